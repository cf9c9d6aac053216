"""KVCacheManager.allocate / append / read / release: pages, handles, isolation, recycling."""

from __future__ import annotations

import random
import unittest

from octavo.core.errors import InvalidInput, OutOfPages, UseAfterRelease
from octavo.core.kv import KVCacheManager

PAGE_SIZES = (1, 2, 3, 4, 16)


def vectors(request: int, position: int) -> tuple[list[float], list[float]]:
    """A key and a value that no other request or position has."""
    return [request + position / 1000, -1.0], [position + request / 1000, 2.0]


class AllocateAppendReadRelease(unittest.TestCase):
    def test_what_is_appended_is_read_back_at_every_page_size(self) -> None:
        for page_size in PAGE_SIZES:
            for count in (1, page_size, page_size + 1, 3 * page_size, 3 * page_size + 2):
                kv = KVCacheManager(64, page_size)
                handle = kv.allocate("a", count)
                for position in range(count):
                    kv.append(handle, *vectors(1, position))
                for position in range(count):
                    key, value = kv.read(handle, position)
                    self.assertEqual((list(key), list(value)), vectors(1, position))
                kv.release(handle)
                kv.audit()
                self.assertEqual(kv.usage().pages.referenced, 0)

    def test_a_page_filled_exactly_needs_no_other(self) -> None:
        kv = KVCacheManager(8, 4)
        kv.allocate("four", 4)
        self.assertEqual(kv.usage().pages.referenced, 1)
        kv.allocate("five", 5)
        self.assertEqual(kv.usage().pages.referenced, 3)

    def test_appending_past_the_reservation_takes_pages_as_needed(self) -> None:
        kv = KVCacheManager(3, 2)
        handle = kv.allocate("a", 2)
        for position in range(6):
            kv.append(handle, *vectors(1, position))
        self.assertEqual(kv.usage().pages.referenced, 3)
        with self.assertRaises(OutOfPages):
            kv.append(handle, *vectors(1, 6))
        self.assertEqual(list(kv.read(handle, 5)[0]), vectors(1, 5)[0])
        kv.audit()

    def test_reading_what_is_not_there(self) -> None:
        kv = KVCacheManager(4, 4)
        handle = kv.allocate("a", 4)
        kv.append(handle, [1.0], [2.0])
        for position in (1, 3, 4, -1):
            with self.assertRaises((InvalidInput, UseAfterRelease), msg=str(position)):
                kv.read(handle, position)

    def test_use_after_release_is_an_error_and_release_is_idempotent(self) -> None:
        kv = KVCacheManager(4, 4)
        handle = kv.allocate("a", 3)
        kv.append(handle, [1.0], [2.0])
        kv.release(handle)
        kv.release(handle)
        with self.assertRaises(UseAfterRelease):
            kv.read(handle, 0)
        with self.assertRaises(UseAfterRelease):
            kv.append(handle, [1.0], [2.0])
        kv.audit()
        self.assertEqual(kv.usage().pages.free, 4)

    def test_an_old_handle_does_not_reach_the_new_request_of_its_name(self) -> None:
        kv = KVCacheManager(4, 4)
        old = kv.allocate("a", 1)
        kv.append(old, [1.0], [1.0])
        kv.release(old)
        new = kv.allocate("a", 1)
        kv.append(new, [2.0], [2.0])
        kv.release(old)
        with self.assertRaises(UseAfterRelease):
            kv.read(old, 0)
        self.assertEqual(list(kv.read(new, 0)[0]), [2.0])

    def test_too_little_memory_changes_nothing(self) -> None:
        kv = KVCacheManager(4, 4)
        held = kv.allocate("a", 9)
        with self.assertRaises(OutOfPages):
            kv.allocate("b", 5)
        kv.audit()
        self.assertEqual((kv.usage().pages.free, kv.usage().pages.referenced), (1, 3))
        kv.allocate("c", 4)
        kv.release(held)
        kv.audit()

    def test_token_counts_must_be_whole_and_positive(self) -> None:
        kv = KVCacheManager(4, 4)
        for count in (-1, 0, 1.5, "2", None):
            with self.assertRaises(ValueError, msg=repr(count)):
                kv.allocate("a", count)
        kv.audit()
        self.assertEqual(kv.usage().pages.free, 4)

    def test_pages_say_who_uses_them(self) -> None:
        kv = KVCacheManager(4, 4)
        handle = kv.allocate("a", 4)
        used = [page for page in range(4) if kv.allocator.describe(page).owners]
        self.assertEqual(len(used), 1)
        self.assertIn("a", str(kv.allocator.describe(used[0]).owners))
        kv.release(handle)
        self.assertFalse(any(kv.allocator.describe(page).owners for page in range(4)))


class RandomLives(unittest.TestCase):
    def test_interleaved_requests_never_mix_and_never_leak(self) -> None:
        for seed in range(12):
            rng = random.Random(seed)
            page_size = rng.choice(PAGE_SIZES)
            kv = KVCacheManager(rng.randint(4, 24), page_size)
            live: dict[int, tuple[object, int]] = {}
            for serial in range(150):
                self.one_action(rng, kv, live, serial)
                kv.audit()
            for handle, _ in live.values():
                kv.release(handle)
            kv.audit()
            self.assertEqual(kv.usage().pages.free, kv.usage().pages.total)

    def one_action(self, rng: random.Random, kv: KVCacheManager, live: dict, serial: int) -> None:
        action = rng.random()
        try:
            if action < 0.3 or not live:
                live[serial] = (kv.allocate(f"r{serial}", rng.randint(1, 12)), 0)
                return
            name = rng.choice(sorted(live))
            handle, length = live[name]
            if action < 0.7:
                kv.append(handle, *vectors(name, length))
                live[name] = (handle, length + 1)
            elif action < 0.9 and length:
                position = rng.randrange(length)
                key, value = kv.read(handle, position)
                self.assertEqual((list(key), list(value)), vectors(name, position))
            else:
                kv.release(handle)
                del live[name]
        except OutOfPages:
            self.assertTrue(live or kv.usage().pages.total * kv.page_size < 12)


if __name__ == "__main__":
    unittest.main()
