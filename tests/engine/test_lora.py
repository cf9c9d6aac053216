"""Adapters in an engine: merged weights are the oracle, bytes depend on nobody else, nobody loses a place in use."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from engine_harness import FIXTURES, MODELS, Collector, assert_idle, run_to_end
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.backends import available_backends
from octavo.backends.adapters import AdapterRoom
from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.core.scheduler import SchedulerConfig
from octavo.engine.adapters import AdapterTable
from octavo.engine.config import EngineConfig
from octavo.engine.fixture import load_fixture
from octavo.engine.llm import LLM
from octavo.engine.parts import build_core, parts_from_fixture
from octavo.engine.recorder import read_epochs
from octavo.engine.replay import replay_epoch
from octavo.weights.lora import read_adapter

ROOM = AdapterRoom(3, 8)
EXACT = [name for name in ("reference", "native") if name in available_backends()]
BACKENDS = [name for name in ("reference", "numpy", "native") if name in available_backends()]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.1, top_k=20, seed=5, max_tokens=6, logprobs=0, presence_penalty=0.3)
PROMPTS = [(1, 9, 31, 44, 12, 7), (1, 9, 31, 44, 12, 7, 50, 23, 18, 36, 5, 41), (4, 4, 7), (1, 9, 31)]


def parts_of(model, backend):
    fixture = load_fixture(FIXTURES / MODELS[model])
    exact = {"format": "fp32", "kv_dtype": "fp32", "threads": 2} if backend == "native" else {}
    return parts_from_fixture(fixture, backend=backend, adapters=ROOM, **exact)


def core_of(parts, **scheduling):
    page_size = 16 if parts.backend.name == "native" else 4
    config = SchedulerConfig(max_seq_len=96, **scheduling)
    return build_core(
        parts, num_pages=96, page_size=page_size, scheduling=config, clock=lambda: 0.0, audit=True, adapters=ROOM
    )


def request(parts, name, prompt, params=GREEDY, adapter=""):
    ids = parts.config.eos_token_ids
    return Request(name, prompt, params, adapter=adapter, namespace=parts.namespace("", adapter), eos_token_ids=ids)


def run(core, requests):
    collector = Collector()
    for each in requests:
        core.submit(each, 0.0)
    run_to_end(core, collector)
    assert_idle(core)
    return collector.choices


def load(core, name, folder):
    return core.load_adapter(name, folder, core.adapters.read(folder)).digest


def merged(model, folder):
    """The fixture with W + scale * B A in the place of each W."""
    fixture = load_fixture(FIXTURES / MODELS[model])
    shapes = parts_of(model, "reference").model.projections()
    weights = dict(fixture.weights)
    for name, each in read_adapter(folder, shapes).factors.items():
        whole = np.asarray(weights[f"{name}.weight"], np.float64) + each.scale * each.b.astype(float) @ each.a
        weights[f"{name}.weight"] = whole.tolist()
    return type(fixture)(**{**fixture.__dict__, "weights": weights})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_merged_weights_are_the_oracle(model, backend, adapter_folder):
    """Logprobs of a prompt, where rows do not depend on what was drawn: within 1e-3 of the merged model's."""
    parts = parts_of(model, backend)
    core = core_of(parts)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, logprobs=0)
    for seed, ends in ((1, ("_proj",)), (2, ("q_proj", "v_proj")), (3, ("up_proj",))):
        folder = adapter_folder(parts.model.projections(), seed, rank=seed + 2, ends=ends)
        found = run(core, [request(parts, f"r{seed}", PROMPTS[1], params, load(core, f"a{seed}", folder))])
        plain = parts_from_fixture(merged(model, folder), backend="reference")
        wanted = run(core_of(plain), [request(plain, "r", PROMPTS[1], params)])
        base = run(
            core_of(plain_parts := parts_of(model, "reference")), [request(plain_parts, "r", PROMPTS[1], params)]
        )
        ours, theirs, bare = (_values(choices) for choices in (found, wanted, base))
        assert np.abs(ours - theirs).max() < 1e-3
        assert np.abs(bare - theirs).max() > 0.05  # the adapter matters


def _values(choices):
    choice = next(iter(choices.values()))
    return np.array([entry.logprob for entry in (*choice.prompt_logprobs[1:], *choice.logprobs)])


@pytest.mark.parametrize("backend", EXACT)
def test_the_same_bytes_in_any_mix(backend, adapter_folder):
    """Each request is what it is alone, whoever has which adapter beside it and however prompts are cut."""
    parts = parts_of("llama", backend)
    shapes = parts.model.projections()
    kinds = ((1, 3, ("_proj",)), (2, 8, ("q_proj", "down_proj")), (3, 1, ("gate_proj", "up_proj", "v_proj")))
    folders = [adapter_folder(shapes, seed, rank=rank, ends=ends) for seed, rank, ends in kinds]
    core = core_of(parts)
    digests = ["", *(load(core, f"a{i}", folder) for i, folder in enumerate(folders))]
    known = {}

    def alone(wanted):
        if wanted not in known:
            prompt, params, adapter = wanted
            one = request(parts, "r", PROMPTS[prompt], (GREEDY, SAMPLED)[params], digests[adapter])
            apart = core_of(parts)
            for i, folder in enumerate(reversed(folders)):  # in other places
                load(apart, f"a{i}", folder)
            known[wanted] = run(apart, [one])["r", 0]
        return known[wanted]

    drawn = st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, 1), st.integers(0, 3))
    chunks = st.sampled_from([1, 3, 64])

    @given(st.lists(drawn, min_size=1, max_size=7), chunks, st.booleans())
    @settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def check(mix, chunk, few):
        together = core_of(parts, max_prefill_chunk=chunk, max_running_requests=3 if few else 64)
        for i, folder in enumerate(folders):
            load(together, f"a{i}", folder)
        requests = [
            request(parts, f"r{i}", PROMPTS[p], (GREEDY, SAMPLED)[q], digests[a]) for i, (p, q, a) in enumerate(mix)
        ]
        found = run(together, requests)
        for i, wanted in enumerate(mix):
            assert found[f"r{i}", 0] == alone(wanted), (i, wanted)

    check()
    different = {tuple(alone((1, 0, adapter)).tokens) for adapter in range(4)}
    assert len(different) > 2


def test_prefixes_are_shared_within_an_adapter_only(adapter_folder):
    parts = parts_of("llama", "reference")
    core = core_of(parts)
    digest = load(core, "a", adapter_folder(parts.model.projections(), 1))
    cached = []
    for number, adapter in enumerate((digest, "", digest, "")):
        collector = Collector()
        core.submit(request(parts, f"r{number}", PROMPTS[1], adapter=adapter), 0.0)
        run_to_end(core, collector)
        cached.append(collector.cached[f"r{number}"])
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) >= 8


class Places:
    """What is in which place; no arithmetic."""

    def __init__(self):
        self.held = {}

    def put(self, place, packed):
        self.held[place] = packed

    def clear(self, place):
        self.held.pop(place, None)


@given(st.lists(st.tuples(st.sampled_from(["load", "unload", "begin", "end"]), st.integers(0, 4), st.integers(0, 5))))
@settings(max_examples=150)
def test_a_place_that_somebody_needs_is_never_written_again(steps):
    """Against a plain model of names, contents and requests: what a request has lies where it was until its end."""
    table = AdapterTable(Places(), {}, AdapterRoom(3, 8))
    names, users = {}, []  # name -> content; [content, place] of requests
    for what, name, content in steps:
        if what == "load":
            wanted = {*names.values(), *(user[0] for user in users), str(content)}
            clash = names.get(f"n{name}", str(content)) != str(content)
            read = SimpleNamespace(digest=str(content), rank=1, packed=content)
            try:
                table.add(f"n{name}", "", read, {user[0] for user in users})
            except InvalidInput:
                assert clash or len(wanted) > 3
            else:
                assert not clash
                assert len(wanted) <= 3
                names[f"n{name}"] = str(content)
        elif what == "unload":
            if names.pop(f"n{name}", None) is None:
                with pytest.raises(InvalidInput, match="no such adapter"):
                    table.remove(f"n{name}")
            else:
                table.remove(f"n{name}")
        elif what == "begin" and f"n{name}" in names:
            digest = table.named(f"n{name}").digest
            users.append([digest, table.place_of(digest)])
        elif what == "end" and users:
            users.pop(name % len(users))
        assert {served.name: served.digest for served in table.served} == names
        for digest, place in users:
            assert (table.place_of(digest), str(table.places.held[place])) == (place, digest)


def test_an_unloaded_adapter_serves_those_that_have_it_to_their_end(adapter_folder):
    """All places taken, one unloaded in the middle of its request: nobody else gets its place before that ends."""
    parts = parts_of("llama", "reference")
    core = core_of(parts)
    shapes = parts.model.projections()
    folders = [adapter_folder(shapes, seed) for seed in range(1, 5)]
    digests = [load(core, f"a{i}", folder) for i, folder in enumerate(folders[:3])]
    wanted = run(core, [request(parts, "first", PROMPTS[0], adapter=digests[0])])["first", 0]
    collector = Collector()
    core.submit(request(parts, "held", PROMPTS[0], adapter=digests[0]), 0.0)
    collector.take(core.step(0.0))
    collector.take(core.step(0.0))
    core.unload_adapter("a0")
    with pytest.raises(InvalidInput, match="all places are taken"):
        load(core, "a3", folders[3])
    run_to_end(core, collector)
    assert collector.choices["held", 0] == wanted
    assert load(core, "a3", folders[3])
    with pytest.raises(InvalidInput, match="no adapter with this content"):
        core.submit(request(parts, "late", PROMPTS[0], adapter=digests[0]), 0.0)


def test_a_name_with_other_content_is_another_adapter(adapter_folder):
    """Fault 22: no wrong adapter and no stale prefix after a name was given to something else."""
    parts = parts_of("llama", "reference")
    core = core_of(parts)
    shapes = parts.model.projections()
    first, second = (adapter_folder(shapes, seed) for seed in (1, 2))
    found = {}
    for number, folder in enumerate((first, second, first)):
        digest = load(core, "name", folder)
        found[number] = run(core, [request(parts, f"r{number}", PROMPTS[1], adapter=digest)])[f"r{number}", 0]
        core.unload_adapter("name")
    assert found[0] == found[2]
    assert found[0] != found[1]
    load(core, "name", first)
    with pytest.raises(InvalidInput, match="stands for another adapter"):
        load(core, "name", second)


def test_a_snapshot_knows_its_adapter(adapter_folder):
    parts = parts_of("llama", "reference")
    folder = adapter_folder(parts.model.projections(), 1)
    core = core_of(parts)
    digest = load(core, "a", folder)
    wanted = run(core, [request(parts, "r", PROMPTS[0], SAMPLED, digest)])["r", 0]
    core.submit(request(parts, "s", PROMPTS[0], SAMPLED, digest), 0.0)
    collector = Collector()
    for _ in range(3):
        collector.take(core.step(0.0))
    saved = json.loads(json.dumps(core.snapshot("s")))
    other = core_of(parts)
    with pytest.raises(InvalidInput, match="no adapter with this content"):
        other.restore(saved, 0.0)
    load(other, "b", folder)
    other.restore(saved, 0.0)
    run_to_end(other, collector)
    assert collector.choices["s", 0].tokens == wanted.tokens


def test_a_recording_is_replayed_with_its_adapters(tmp_path, adapter_folder):
    shapes = parts_of("llama", "reference").model.projections()
    first, second = (adapter_folder(shapes, seed) for seed in (1, 2))
    path = tmp_path / "r.octl"
    llm = LLM(
        str(FIXTURES / MODELS["llama"]),
        backend="reference",
        lora=f"one={first}",
        max_loras=2,
        record=str(path),
        max_seq_len=64,
    )
    texts = [llm.generate([list(PROMPTS[0])], GREEDY, lora=name)[0].outputs[0].token_ids for name in ("one", None)]
    llm.load_lora("two", second)
    texts.append(llm.generate([list(PROMPTS[0])], GREEDY, lora="two")[0].outputs[0].token_ids)
    llm.unload_lora("two")
    assert len({tuple(ids) for ids in texts}) > 1
    with pytest.raises(InvalidInput, match="no such adapter"):
        llm.generate([list(PROMPTS[0])], GREEDY, lora="two")
    llm.loaded.core.close()
    (epoch,), _ = read_epochs(path)
    for run_model in (False, True):
        assert replay_epoch(epoch, run_model=run_model, say=lambda line: None).difference is None
    adapter_folder(shapes, 2, size=0.2)
    with pytest.raises(InvalidInput, match="does not hold what it held then"):
        replay_epoch(epoch, run_model=True, say=lambda line: None)


@pytest.mark.parametrize("lora", ["a", "=x", "a=x,a=y", "a b=x", "a=", "ä=x"])
def test_lists_of_adapters_that_are_none(lora):
    with pytest.raises(InvalidInput, match="lora"):
        EngineConfig(lora=lora)


def test_the_plan_has_room_for_all_places():
    config = EngineConfig(lora="a=x,b=y", max_loras=5, max_lora_rank=32)
    assert config.adapter_room == AdapterRoom(5, 32)
    assert EngineConfig(lora="a=x,b=y").adapter_room.places == 2
    for settings_ in ({"lora": "a=x,b=y", "max_loras": 1}, {"max_loras": 9999}, {"max_lora_rank": 0}):
        with pytest.raises(InvalidInput):
            EngineConfig(**settings_)


def test_an_engine_without_room_says_so(adapter_folder):
    llm = LLM(str(FIXTURES / MODELS["llama"]), backend="reference", max_seq_len=64)
    with pytest.raises(InvalidInput, match="--max-loras"):
        llm.load_lora("a", adapter_folder({}, 1))
    with pytest.raises(InvalidInput, match="--max-loras"):
        llm.generate([[1, 2]], GREEDY, lora="a")


def test_folders_that_cannot_be_read_leave_everything_as_it_was(adapter_folder, tmp_path):
    parts = parts_of("llama", "reference")
    core = core_of(parts)
    good = adapter_folder(parts.model.projections(), 1)
    load(core, "a", good)
    for path in (str(tmp_path / "nowhere"), "", "x\0y", "y" * 5000):
        with pytest.raises(InvalidInput):
            core.adapters.read(path)
    Path(good, "adapter_model.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(InvalidInput):
        core.adapters.read(good)
    assert [served.name for served in core.adapters.served] == ["a"]


def test_a_step_that_computes_an_ended_request_once_too_often_still_needs_its_adapter(adapter_folder):
    """A step planned ahead has a row of a request that the step before it ends: its place is not free before that."""
    parts = parts_of("llama", "reference")
    core = core_of(parts)
    digest = load(core, "a", adapter_folder(parts.model.projections(), 1))
    second = run(core, [request(parts, "r", PROMPTS[0], adapter=digest)])["r", 0].tokens[1]
    params = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=(second,))
    scheduler = core.scheduler
    core.submit(request(parts, "s", PROMPTS[2], params, digest), 0.0)
    core.submit(request(parts, "ends", PROMPTS[0], params, digest), 0.0)
    core.cancel("s")
    core.step(0.0)
    decision = scheduler.plan(0.0)
    assert scheduler.plan_ahead(0.0)
    result = core.executor(decision)
    behind = scheduler.advance(result)
    scheduler.commit(result, 0.0)
    assert scheduler.get("ends") is None
    assert scheduler.adapters_in_use() == {digest}
    scheduler.commit(core.executor(behind), 0.0)
    assert scheduler.adapters_in_use() == frozenset()
