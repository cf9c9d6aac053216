"""Make the golden data of tests/models/data with `transformers`, which shares no code with Octavo's models.

    python -m venv goldens && goldens/bin/pip install torch transformers accelerate gguf safetensors
    goldens/bin/python scripts/make_goldens.py --tiny --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf \
        --gemma3 gemma-3-270m-q4_k_m.gguf

The stored data was made with torch 2.13 (CPU), transformers 5.24, gguf 0.19 and NumPy 2. `octavo models` says where
the two files are. Without arguments nothing is written. About five minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "models" / "data"


def main() -> None:
    """Write the goldens that the arguments ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smollm2", type=Path, metavar="PATH", help="SmolLM2-135M-Instruct as .gguf")
    parser.add_argument("--gemma3", type=Path, metavar="PATH", help="Gemma 3 270M (base) as .gguf")
    parser.add_argument("--tiny", action="store_true", help="tiny random checkpoints of every architecture")
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]
    from golden_prompts import CHAT_PROMPTS, PLAIN_PROMPTS

    if args.smollm2:
        from golden_real import write_real

        write_real(args.smollm2, CHAT_PROMPTS, True, DATA / "smollm2")
    if args.gemma3:
        from golden_real import write_real

        write_real(args.gemma3, PLAIN_PROMPTS, False, DATA / "gemma3")
    if args.tiny:
        from golden_tiny import write_tiny

        write_tiny(DATA / "tiny")


if __name__ == "__main__":
    main()
