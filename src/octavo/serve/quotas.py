"""What each key may still use."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from octavo.core.quota import Bucket
from octavo.serve.errors import ApiError
from octavo.serve.keys import Key

__all__ = ["Quotas"]


@dataclass
class _Account:
    requests: Bucket
    tokens: Bucket
    inside: int = 0


class Quotas:
    """Requests and tokens a minute and requests at once, by key. Used from the event loop only."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    @contextmanager
    def inside(self, key: Key | None) -> Iterator[None]:
        """One request of a key, while the block runs. Raises ``ApiError`` 429."""
        if key is None:
            yield
            return
        account, now = self._account(key), time.monotonic()
        if key.concurrent and account.inside >= key.concurrent:
            raise _refused(f"{account.inside} of your requests run, and {key.concurrent} may", 1.0, "concurrent")
        self._check(account.requests, 1, "requests", now)
        account.requests.take(1, now)
        account.inside += 1
        try:
            yield
        finally:
            account.inside -= 1

    def check_tokens(self, key: Key | None, prompt_tokens: int) -> None:
        """Refuse a prompt for which there are no tokens left. Raises ``ApiError`` 429."""
        if key is not None:
            self._check(self._account(key).tokens, prompt_tokens, "tokens", time.monotonic())

    def charge_tokens(self, key: Key | None, tokens: int) -> None:
        """A request has used so many."""
        if key is not None:
            self._account(key).tokens.take(tokens, time.monotonic())

    def _check(self, bucket: Bucket, amount: int, what: str, now: float) -> None:
        seconds = bucket.wait(amount, now)
        if seconds > 0.0:
            raise _refused(f"your quota of {bucket.per_minute} {what} a minute is used up", seconds, what)

    def _account(self, key: Key) -> _Account:
        known = self._accounts.get(key.name)
        if known is None:
            known = _Account(Bucket(key.requests_per_minute), Bucket(key.tokens_per_minute))
            self._accounts[key.name] = known
        return known


def _refused(why: str, seconds: float, what: str) -> ApiError:
    whole = max(1, math.ceil(seconds))
    told = {"Retry-After": str(whole)}
    return ApiError(429, f"Not now: {why}; try again in {whole} s.", code=f"quota_{what}", headers=told)
