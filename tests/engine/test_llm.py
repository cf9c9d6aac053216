"""LLM: prompts of all kinds in, answers in their order out; and the loader that puts it together."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from engine_harness import FIXTURES, assert_idle

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.core.params import SamplingParams
from octavo.decoding.grammar.checker import GrammarChecker
from octavo.engine.config import EngineConfig
from octavo.engine.llm import LLM
from octavo.engine.loader import load_engine, load_parts
from octavo.engine.parts import check_tensors

TINY = str(FIXTURES / "tiny_model.json")
GOLDEN = json.loads((FIXTURES / "tiny_model.json").read_text(encoding="utf-8"))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def make(**options: Any) -> LLM:
    return LLM(TINY, backend="reference", page_size=4, say=lambda line: None, **options)


def test_texts_token_ids_and_mixtures_give_the_same_answers() -> None:
    llm = make()
    ids = llm.tokenizer.encode("hello")
    mixed = llm.generate(["hello", ids, tuple(ids)], GREEDY)
    golden = GOLDEN["golden"]["requests"]["short"]["token_ids"]
    assert [output.outputs[0].token_ids for output in mixed] == [golden] * 3
    assert [output.prompt for output in mixed] == ["hello", None, None]
    assert llm.generate("hello", GREEDY)[0].outputs[0].token_ids == golden
    assert llm.generate(ids, GREEDY)[0].outputs[0].token_ids == golden
    assert llm.generate([], GREEDY) == []
    assert_idle(llm.loaded.core)


def test_answers_keep_the_order_of_the_prompts() -> None:
    llm = make(max_running_requests=3, max_batched_tokens=8)
    requests = [r for r in GOLDEN["scenario"]["requests"] if r["id"] != "cancelled"]
    params = [SamplingParams(temperature=0.0, max_tokens=r["max_tokens"]) for r in requests]
    outputs = llm.generate([r["prompt_token_ids"] for r in requests], params)
    for request, output in zip(requests, outputs, strict=True):
        golden = GOLDEN["golden"]["requests"][request["id"]]
        assert output.outputs[0].token_ids == golden["token_ids"]
        assert output.outputs[0].finish_reason == golden["finish_reason"]
        assert output.usage["total_tokens"] == len(request["prompt_token_ids"]) + len(golden["token_ids"])


def test_a_grammar_is_tried_out_in_a_process_that_can_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.llm.GrammarChecker", partial(GrammarChecker, cpu_seconds=1e-6))
    llm = make()
    many = {f"p{i}": {"type": "string", "pattern": "^a{1,50}$"} for i in range(700)}
    grammars = Grammar("json_schema", json.dumps({"properties": many})), Grammar("regex", "a{3}")
    first, second = (SamplingParams(max_tokens=6, grammar=grammar) for grammar in grammars)
    with pytest.raises(InvalidInput, match="more than 1e-06 s"):
        llm.generate(["hello", "hello"], [GREEDY, first])
    assert_idle(llm.loaded.core)
    assert llm._checker is not None and not llm.loaded.core.knows(first)
    llm._checker.cpu_seconds = 2.0
    assert llm.generate("hello", second)[0].outputs[0].text == "aaa"
    llm._checker.close()


def test_choices_logprobs_and_stop_strings_arrive_whole() -> None:
    llm = make()
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=5, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    (output,) = llm.generate(["hello"], params)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    for choice in output.outputs:
        assert len(choice.token_ids) == len(choice.logprobs) == 5
        assert choice.text == llm.tokenizer.decode(choice.token_ids)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.usage["completion_tokens"] == 15
    stopped = llm.generate("the quick brown fox jumps over", SamplingParams(temperature=0.0, max_tokens=24, stop="9"))
    assert (stopped[0].outputs[0].text, stopped[0].outputs[0].stop_reason) == ("mpp0s", "9")


def test_what_looks_back_holds_for_the_whole_output() -> None:
    llm, long = make(), {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    (free,) = llm.generate("the quick brown fox", SamplingParams(**long))
    text, ids = free.outputs[0].text, free.outputs[0].token_ids
    (banned,) = llm.generate("the quick brown fox", SamplingParams(bad_words=[text[3:5], text[8]], **long))
    assert text[3:5] not in banned.outputs[0].text and text[8] not in banned.outputs[0].text
    (once,) = llm.generate("the quick brown fox", SamplingParams(no_repeat_ngram_size=1, **long))
    assert len({*once.outputs[0].token_ids, *once.prompt_token_ids}) == 24 + len(set(once.prompt_token_ids))
    loop = SamplingParams(logit_bias={ids[0]: 99.0}, repetition_detection={"max_pattern_size": 1}, **long)
    for n in (1, 3):
        (looped,) = llm.generate("the quick brown fox", replace(loop, n=n))
        for choice in looped.outputs:
            assert (choice.token_ids, choice.finish_reason) == ([ids[0]] * 3, "stop")
            assert choice.stop_reason == "repetition"
    punished = replace(loop, repetition_detection=None, dry_multiplier=100.0, dry_allowed_length=1)
    (dry,) = llm.generate("the quick brown fox", punished)
    assert dry.outputs[0].token_ids[:4] != [ids[0]] * 4
    assert_idle(llm.loaded.core)


NOT_PROMPTS = (None, 5, {"prompt": "a"}, {1, 2}, b"ab", [b"ab"], [[]], [1, "a"], [[1, 2.0]], [True], ["a", None])
NOT_PARAMS = (5, "x", {"max_tokens": 3}, [], [{}], [GREEDY] * 2)
NOT_MESSAGES = (None, "hi", ["hi"], {"role": "user", "content": "hi"}, [[]])


def test_a_wrong_type_is_refused_by_name_and_leaves_nothing_behind() -> None:
    llm = make()
    for prompts in NOT_PROMPTS:
        with pytest.raises(InvalidInput, match="prompt"):
            llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
    for params in NOT_PARAMS:
        with pytest.raises(InvalidInput, match="params"):
            llm.generate(["a"], params)  # type: ignore[arg-type]
    for messages in NOT_MESSAGES:
        with pytest.raises(InvalidInput, match="messages"):
            llm.chat(messages, GREEDY)  # type: ignore[arg-type]
    assert_idle(llm.loaded.core)


def test_prompts_may_be_arrays_and_iterators() -> None:
    llm = make()
    (wanted,) = llm.generate([[1, 2, 3]], GREEDY)
    for prompts in (np.array([1, 2, 3]), [np.array([1, 2, 3])], range(1, 4), iter([[1, 2, 3]])):
        (output,) = llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids


def test_a_refused_prompt_leaves_nothing_behind() -> None:
    llm = make()
    with pytest.raises(InvalidInput):
        llm.generate([[5, 6], [5, 999]], GREEDY)
    assert not llm.loaded.core.has_work
    assert_idle(llm.loaded.core)
    with pytest.raises(InvalidInput, match="params"):
        llm.generate(["a", "b"], [GREEDY])
    assert len(llm.generate(["a"], GREEDY)) == 1


@pytest.mark.parametrize("place", ["step", "executor"])
def test_an_interruption_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    llm = make()
    calls = iter([None, None, KeyboardInterrupt()])
    real = getattr(llm.loaded.core, place)

    def interrupted(argument: Any) -> Any:
        error = next(calls, None)
        if error is not None:
            raise error
        return real(argument)

    monkeypatch.setattr(llm.loaded.core, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello", "world"], GREEDY)
    assert_idle(llm.loaded.core)
    assert not llm.loaded.core.has_work


def test_chat_uses_a_template() -> None:
    llm = make()
    one = llm.chat([{"role": "user", "content": "hello"}], GREEDY)
    two = llm.chat([[{"role": "user", "content": "hello"}], [{"role": "user", "content": "bye"}]], GREEDY)
    assert len(one) == 1
    assert two[0].outputs[0].token_ids == one[0].outputs[0].token_ids
    assert len(two) == 2


def test_a_progress_bar_changes_nothing() -> None:
    assert make().generate("hello", GREEDY, use_tqdm=True)[0].outputs == make().generate("hello", GREEDY)[0].outputs


def test_numpy_gives_the_same_tokens() -> None:
    llm = LLM(TINY, backend="numpy", page_size=4, say=lambda line: None)
    requests = [r for r in GOLDEN["scenario"]["requests"] if r["id"] != "cancelled"]
    params = [SamplingParams(temperature=0.0, max_tokens=r["max_tokens"]) for r in requests]
    outputs = llm.generate([r["prompt_token_ids"] for r in requests], params)
    for request, output in zip(requests, outputs, strict=True):
        assert output.outputs[0].token_ids == GOLDEN["golden"]["requests"][request["id"]]["token_ids"]
    other = LLM(str(FIXTURES / "tiny_two_groups.json"), backend="numpy", page_size=2, say=lambda line: None)
    golden = json.loads((FIXTURES / "tiny_two_groups.json").read_text(encoding="utf-8"))["golden"]["requests"]
    outputs = other.generate([r["prompt_token_ids"] for r in requests], params)
    for request, output in zip(requests, outputs, strict=True):
        assert output.outputs[0].token_ids == golden[request["id"]]["token_ids"]


def test_unseeded_requests_differ_unless_the_engine_has_a_seed() -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    answers = [make(seed=seed).generate(["hello"] * 2, params) for seed in (0, 7, 7)]
    texts = [[output.outputs[0].token_ids for output in answer] for answer in answers]
    assert texts[0][0] != texts[0][1]
    assert texts[1] == texts[2]
    assert texts[0] != texts[1]


def test_the_plan_is_printed_and_kept() -> None:
    lines: list[str] = []
    loaded = load_engine(EngineConfig(TINY, backend="reference", kv_memory="1MiB"), say=lines.append)
    assert "memory plan" in lines[0]
    assert "KV cache" in lines[0]
    assert loaded.core.kv.allocator.num_pages == loaded.plan.num_pages
    assert loaded.plan.kv <= 1 << 20
    assert loaded.max_seq_len == 128


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"model": "no-such-model"}, "model"),
        ({"backend": "gpu"}, "backend"),
        ({"format": "int4"}, "format"),
        ({"page_size": 0}, "page_size"),
        ({"kv_memory": "plenty"}, "kv_memory"),
        ({"kv_memory": "1KiB"}, "kv_memory"),
        ({"memory_fraction": 0.0}, "memory_fraction"),
        ({"policy": "lottery"}, "policy"),
        ({"memory_fraction": 1e-9}, "memory"),
        ({"flavour": "mint"}, "flavour"),
    ],
)
def test_a_wrong_option_says_what_is_right(options: dict[str, Any], field: str) -> None:
    settings = {"model": TINY, "offline": True, "backend": "reference", "say": lambda line: None, **options}
    with pytest.raises(InvalidInput) as caught:
        LLM(**settings)
    assert caught.value.field == field
    assert caught.value.remedy


def test_tensors_are_checked_by_name_and_shape() -> None:
    expected = {"a.weight": (2, 3), "b.weight": (4,)}
    check_tensors({**expected, "lm_head.weight": (9, 9), "x.rotary_emb.inv_freq": (2,)}, expected, tied=True)
    for found, word in (
        ({"a.weight": (2, 3)}, "b.weight"),
        ({**expected, "c.weight": (1,)}, "c.weight"),
        ({**expected, "b.weight": (5,)}, "b.weight"),
    ):
        with pytest.raises(InvalidInput, match=word):
            check_tensors(found, expected, tied=True)
    with pytest.raises(InvalidInput, match="lm_head"):
        check_tensors({**expected, "lm_head.weight": (9, 9)}, expected, tied=False)


def test_a_checkpoint_folder_and_its_identity(tmp_path: Any) -> None:
    """The tiny model written as safetensors and config.json gives the fixture's tokens."""
    import numpy as np
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordLevel

    from octavo.engine.fixture import load_fixture
    from octavo.weights.safetensors import write_safetensors

    fixture = load_fixture(TINY)
    weights = {name: np.asarray(values, np.float32) for name, values in fixture.weights.items()}
    write_safetensors(tmp_path / "model.safetensors", weights)
    (tmp_path / "config.json").write_text(json.dumps(dict(fixture.config)), encoding="utf-8")
    words = Tokenizer(WordLevel({token: i for i, token in enumerate(GOLDEN["tokenizer"]["vocab"])}, unk_token="<unk>"))
    words.decoder = decoders.ByteLevel()
    words.save(str(tmp_path / "tokenizer.json"))
    llm = LLM(str(tmp_path), backend="numpy", say=lambda line: None)
    prompt = GOLDEN["scenario"]["requests"][0]["prompt_token_ids"]
    assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == GOLDEN["golden"]["requests"]["short"]["token_ids"]
    before = load_parts(EngineConfig(str(tmp_path), backend="numpy")).namespace()
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    write_safetensors(tmp_path / "model.safetensors", weights)
    assert load_parts(EngineConfig(str(tmp_path), backend="numpy")).namespace() != before


def test_texts_become_vectors() -> None:
    llm = make()
    ids = llm.tokenizer.encode("hello")
    one, same, other = llm.embed(["hello", ids, "world"])
    assert one == same != other and len(one) == llm.loaded.parts.config.hidden_size
    assert math.hypot(*one) == pytest.approx(1.0, abs=1e-6)
    (raw,) = llm.embed("hello", normalize=False)
    assert one == pytest.approx([value / math.hypot(*raw) for value in raw])
    (short,) = llm.embed("hello", dimensions=3)
    assert short == pytest.approx([value / math.hypot(*raw[:3]) for value in raw[:3]])
    assert llm.embed("hello", pooling="mean") != [one] != llm.embed("hello", pooling="cls")
    for field, value in (("dimensions", 0), ("pooling", "max")):
        with pytest.raises(InvalidInput, match=field):
            llm.embed("hello", **{field: value})
    assert_idle(llm.loaded.core)
