"""Who is protected from preemption finds the pages it has a claim on, whoever it shares pages with."""

from builders import Bench, make_kv, make_request
from hypothesis import example, given, settings
from hypothesis import strategies as st
from null_model import null_tokens

from octavo.core.request import WaitingReason

CONTEXT, CHUNK = 24, 1

ASK = st.tuples(st.integers(0, 1), st.integers(1, 14), st.integers(1, 9), st.sampled_from(["", "", "apart", "gang"]))
WINDOWS = st.lists(st.sampled_from([2, 3, 4, 6, 0]), min_size=1, max_size=2)


def play(windows, page_size, room, preemptions, asks):
    """Requests that begin alike; (rows, protected ones that found no page) of each step. ``room``: pages beyond what
    two need."""
    needed = make_kv(64, page_size, windows).num_pages_needed(CONTEXT, CHUNK)
    bench = Bench(
        make_kv(2 * needed + room, page_size, windows),
        max_preemptions=preemptions,
        max_prefill_chunk=CHUNK,
        max_seq_len=CONTEXT,
    )
    prompts = [[kind] * length + [i] * (how == "apart") for i, (kind, length, _, how) in enumerate(asks)]
    for i, (prompt, ask) in enumerate(zip(prompts, asks, strict=True)):
        gang = ask[3] == "gang"
        bench.submit(make_request(f"r{i}", prompt, max_tokens=ask[2], gang=gang, n=1 + gang))
    protected = bench.scheduler._planner.claims.protected
    while bench.scheduler.has_work:
        rows = bench.step().rows
        running = bench.scheduler.roster.running
        yield rows, [b for b in running if protected(b) and b.waiting_reason is WaitingReason.KV]
    for i, (prompt, ask) in enumerate(zip(prompts, asks, strict=True)):
        assert ask[3] == "gang" or bench.tokens(f"r{i}") == null_tokens(prompt, ask[2], 7)


@settings(max_examples=60)
@given(WINDOWS, st.integers(1, 2), st.integers(0, 6), st.integers(0, 1), st.lists(ASK, min_size=3, max_size=6))
@example([4], 1, 4, 0, [(0, 9, 9, "apart"), (0, 9, 9, "apart"), (1, 9, 9, "apart"), (1, 9, 9, "apart")])
def test_the_protected_find_their_pages(windows, page_size, room, preemptions, asks):
    """Found by simulation: of two that share a page, each was thought to give it back once its window has passed."""
    for rows, without in play(windows, page_size, room, preemptions, asks):
        assert rows and not without
