"""docs/contract.md names tests that exist, and every contract test class or test is named by a clause or its module."""

from __future__ import annotations

import re
import unittest

from contract_support import ROOT

DOCUMENT = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")


class Document(unittest.TestCase):
    def test_every_test_that_it_names_exists(self) -> None:
        sources = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "contract").glob("*.py")}
        everything = "\n".join(sources.values())
        for name in re.findall(r"`(test_\w+(?:\.\w+)?)`", DOCUMENT):
            module, _, member = name.partition(".")
            if member:
                self.assertRegex(sources[module], rf"(class|def) {member}\b", name)
            else:
                self.assertTrue(module in sources or f"def {module}(" in everything, name)

    def test_every_path_that_it_names_exists(self) -> None:
        for path in re.findall(r"`((?:tests|core|docs)/[\w/.]*)`", DOCUMENT):
            place = ROOT / ("src/octavo/" + path if path.startswith("core/") else path)
            self.assertTrue(place.exists(), path)

    def test_every_module_of_the_contract_is_named(self) -> None:
        for path in sorted((ROOT / "tests" / "contract").glob("test_*.py")):
            if path.stem != "test_document":
                self.assertIn(f"`{path.stem}", DOCUMENT)


if __name__ == "__main__":
    unittest.main()
