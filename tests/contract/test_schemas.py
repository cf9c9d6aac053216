"""Schemas of models, requests, events, quantization and scenarios; the fixture; the driver; the bare interpreter."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import subprocess
import sys
import unittest
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contract_support import ROOT, TINY, TWO_GROUPS, engine, fixture

from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams
from octavo.engine.driver import main
from octavo.engine.fixture import load_fixture
from octavo.engine.schema import SCHEMA_NAMES, load_schema, validate


def document(path: Path = TINY) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


class Schemas(unittest.TestCase):
    def test_every_keyword_in_the_schemas_is_checked(self) -> None:
        for name in SCHEMA_NAMES:
            with self.assertRaises(InvalidInput):
                validate(object(), name)
            with self.assertRaises(InvalidInput):
                validate({}, {**load_schema(name), "patternProperties": {}})

    def test_the_fixtures_fit(self) -> None:
        for path in (TINY, TWO_GROUPS):
            validate(document(path), "fixture")

    def test_what_does_not_fit_is_named(self) -> None:
        breaks = [
            ("$.model.vocab_size", lambda d: d["model"].update(vocab_size=0)),
            ("$.model.vocab_size", lambda d: d["model"].update(vocab_size=True)),
            ("$.scenario.page_size", lambda d: d["scenario"].update(page_size=1.5)),
            ("$.scenario.requests[1].max_tokens", lambda d: d["scenario"]["requests"][1].update(max_tokens=-1)),
            (
                "$.scenario.requests[0].prompt_token_ids",
                lambda d: d["scenario"]["requests"][0].update(prompt_token_ids=[]),
            ),
            ("$.scenario.requests[0].color", lambda d: d["scenario"]["requests"][0].update(color="red")),
            ("$.scenario.quantization[1].bits", lambda d: d["scenario"]["quantization"][1].update(bits=3)),
            ("$.schema", lambda d: d.update(schema="other/1")),
            ("$", lambda d: d.pop("golden")),
        ]
        for path, spoil in breaks:
            spoiled = copy.deepcopy(document())
            spoil(spoiled)
            with self.assertRaises(InvalidInput) as caught:
                validate(spoiled, "fixture")
            self.assertEqual(caught.exception.field, path)

    def test_every_event_of_a_run_fits_the_event_schema(self) -> None:
        running = engine()
        params = SamplingParams(n=2, temperature=1.0, logprobs=1, prompt_logprobs=1, seed=1)
        name = running.submit([1, 5, 6], 3, params=params)
        events = list(running.stream(name))
        for event in events:
            validate(json.loads(json.dumps(asdict(event))), "event")
        self.assertEqual({event.kind.value for event in events}, {"token", "choice_end", "request_end"})

    def test_an_unknown_schema(self) -> None:
        with self.assertRaises(InvalidInput):
            load_schema("nothing")


class Fixtures(unittest.TestCase):
    def test_a_broken_file_is_refused_with_its_reason(self) -> None:
        with self.assertRaises(InvalidInput):
            load_fixture(ROOT / "fixtures" / "absent.json")
        with self.assertRaises(InvalidInput):
            load_fixture(ROOT / "README.md")

    def test_the_golden_tokens_come_from_the_script(self) -> None:
        """The independent forward pass gives exactly the files that are stored."""
        script = ROOT / "scripts" / "make_tiny_fixture.py"
        self.assertNotIn("octavo.", script.read_text(encoding="utf-8").replace("octavo.fixture/1", ""))
        done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_tokenizer_goes_there_and_back(self) -> None:
        tokenizer = fixture().tokenizer
        self.assertEqual(tokenizer.decode(tokenizer.encode("hello, world 42!")), "hello, world 42!")
        self.assertEqual(tokenizer.encode("~", add_special_tokens=False), [3])


class Driver(unittest.TestCase):
    def run_driver(self, *arguments: str) -> tuple[int, str]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            status = main(arguments)
        return status, out.getvalue()

    def test_the_manifest(self) -> None:
        status, text = self.run_driver("--fixture", str(TINY))
        told = json.loads(text)
        self.assertEqual(status, 0)
        self.assertEqual(told["name"], "tiny-llama")
        self.assertEqual([r["id"] for r in told["requests"]], [r["id"] for r in document()["scenario"]["requests"]])
        self.assertEqual(told["pages"], {"page_size": 4, "num_pages": 48})

    def test_a_run_agrees_with_the_golden_tokens(self) -> None:
        for path in (TINY, TWO_GROUPS):
            status, text = self.run_driver("--fixture", str(path), "--run")
            self.assertEqual(status, 0, text)
            self.assertTrue(json.loads(text)["timeline"])

    def test_a_missing_fixture(self) -> None:
        self.assertEqual(self.run_driver("--fixture", "absent.json")[0], 2)


class BareInterpreter(unittest.TestCase):
    def test_the_engine_needs_the_standard_library_alone(self) -> None:
        """Every module from outside is refused, and the scenario still runs."""
        program = (
            "import sys\n"
            "class Block:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        top = name.partition('.')[0]\n"
            "        if top not in sys.stdlib_module_names and top != 'octavo':\n"
            "            raise ImportError('blocked: ' + name)\n"
            "sys.meta_path.insert(0, Block())\n"
            "from octavo.engine.driver import main\n"
            f"sys.exit(main(['--fixture', {str(TINY)!r}, '--run']))\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-S", "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
