"""int8 and int4: edge cases, what is refused, metadata that explains the scales, and the tiny model running on both."""

from __future__ import annotations

import json
import math
import random
import unittest

from contract_support import TINY, engine, fixture, tokens_of

from octavo.backends.quantization import GROUP_SIZES, QuantConfig, QuantizedTensor, dequantize, quantize, report
from octavo.engine.scenario import manifest, quantization_report
from octavo.engine.schema import validate

CONFIGS = [QuantConfig(bits, size, symmetric) for bits in (8, 4) for size in GROUP_SIZES for symmetric in (True, False)]


class Values(unittest.TestCase):
    def test_zeros_are_exact(self) -> None:
        for config in CONFIGS:
            matrix = [[0.0] * 40, [0.0, 1.5] * 20]
            back = dequantize(quantize(matrix, config))
            self.assertEqual(back[0], matrix[0])
            self.assertEqual([value for value in back[1] if value == 0.0], [0.0] * 20)

    def test_constants_stay_within_half_a_step(self) -> None:
        for config in CONFIGS:
            for constant in (1.0, -3.25, 1e-30, -1e30):
                tensor = quantize([[constant] * 33], config)
                error = max(abs(a - constant) for a in dequantize(tensor)[0])
                self.assertLessEqual(error, max(tensor.scales[0]) / 2, (config, constant))

    def test_extremes_are_reached_and_never_overflow(self) -> None:
        top = 3.4028234663852886e38
        for config in CONFIGS:
            for matrix in ([[top, -top] * 16], [[top, 0.0] * 16], [[1e-45, -1e-45] * 16], [[top, 1e-45] * 16]):
                tensor = quantize(matrix, config)
                for value, back in zip(matrix[0], dequantize(tensor)[0], strict=True):
                    self.assertTrue(math.isfinite(back))
                    self.assertLessEqual(abs(value - back), max(tensor.scales[0]) / 2 * (1 + 1e-6))

    def test_every_value_is_within_half_a_step_of_its_group(self) -> None:
        rng = random.Random(1)
        for config in CONFIGS:
            matrix = [[rng.gauss(0, 10 ** rng.uniform(-3, 3)) for _ in range(70)] for _ in range(3)]
            tensor = quantize(matrix, config)
            for row, back, scales in zip(matrix, dequantize(tensor), tensor.scales, strict=True):
                for i, (a, b) in enumerate(zip(row, back, strict=True)):
                    self.assertLessEqual(abs(a - b), scales[i // config.group_size] / 2 * (1 + 1e-6))

    def test_a_group_of_its_own_protects_from_a_neighbour_s_outlier(self) -> None:
        matrix = [[1e6] + [0.0] * 15 + [0.01 * i for i in range(16)]]
        back = dequantize(quantize(matrix, QuantConfig(8, 16)))[0]
        self.assertLess(max(abs(a - b) for a, b in zip(matrix[0][16:], back[16:], strict=True)), 0.001)


class Refusals(unittest.TestCase):
    def test_unsupported_bits_and_groups(self) -> None:
        for bits in (0, 1, 2, 3, 5, 16, True, "8"):
            with self.assertRaises(ValueError):
                QuantConfig(bits, 16)
        for size in (0, -16, 1, 8, 17, 256, True):
            with self.assertRaises(ValueError):
                QuantConfig(8, size)

    def test_values_that_float32_does_not_have(self) -> None:
        for bad in (math.nan, math.inf, -math.inf, 1e39):
            with self.assertRaises(ValueError):
                quantize([[0.0, bad]], QuantConfig())

    def test_empty_and_ragged_matrices(self) -> None:
        for matrix in ([], [[]], [[1.0], [1.0, 2.0]]):
            with self.assertRaises(ValueError):
                quantize(matrix, QuantConfig())


class Metadata(unittest.TestCase):
    def test_the_metadata_alone_explains_the_values(self) -> None:
        rng = random.Random(2)
        matrix = [[rng.uniform(-2, 1) for _ in range(37)] for _ in range(2)]
        for config in CONFIGS:
            tensor = quantize(matrix, config)
            stored = json.loads(json.dumps(tensor.to_dict()))
            validate(stored["config"], "quantization")
            self.assertEqual(dequantize(QuantizedTensor.from_dict(stored)), dequantize(tensor))

    def test_codes_scales_and_zero_points_give_the_values_by_the_written_rule(self) -> None:
        """value = scale * (code - zero_point), worked out here by hand from the stored parts."""
        matrix = [[0.5, -1.0, 2.0, 0.0] * 5]
        for config in (QuantConfig(8, 16, False), QuantConfig(4, 16, False), QuantConfig(4, 16, True)):
            tensor = quantize(matrix, config)
            raw = tensor.codes[0]
            codes = list(raw) if config.bits == 8 else [half for byte in raw for half in (byte & 15, byte >> 4)]
            for i, value in enumerate(dequantize(tensor)[0]):
                group = i // config.group_size
                zero = 1 << (config.bits - 1) if config.symmetric else tensor.zero_points[0][group]
                self.assertEqual(value, tensor.scales[0][group] * (codes[i] - zero))

    def test_bytes_are_counted_and_fall(self) -> None:
        matrix = [[float(i % 7) for i in range(64)] for _ in range(4)]
        for config in CONFIGS:
            told = report(matrix, quantize(matrix, config))
            packed = 4 * 64 * config.bits // 8
            groups = 4 * math.ceil(64 / config.group_size)
            self.assertEqual(told["bytes_after"], packed + groups * (4 if config.symmetric else 5))
            self.assertEqual(told["bytes_before"], 4 * 4 * 64)


class TinyModel(unittest.TestCase):
    def test_int8_and_int4_paths_run_and_report_error_and_bytes(self) -> None:
        told = [quantization_report(fixture(), config) for config in (QuantConfig(8, 16), QuantConfig(4, 16, False))]
        self.assertLess(told[0]["max_error"], 0.01)
        self.assertLess(told[1]["max_error"], 0.1)
        self.assertLess(told[0]["mean_error"], told[1]["mean_error"])
        self.assertLess(told[1]["bytes_after"], told[0]["bytes_after"])
        self.assertLess(told[0]["ratio"], 0.4)
        for config in (QuantConfig(8, 16), QuantConfig(4, 16, False)):
            quantized = engine(TINY, quantization=config)
            plain = engine(TINY)
            self.assertLess(quantized.parts.weight_bytes, plain.parts.weight_bytes / 2)
            self.assertNotEqual(quantized.parts.numerics_id, plain.parts.numerics_id)
            tokens = tokens_of(quantized, quantized.submit([1, 12, 9, 16], 8))
            self.assertEqual(len(tokens), 8)

    def test_a_quantized_run_equals_a_run_on_the_dequantized_weights(self) -> None:
        """The path computes with the integers, not with the floats that they came from."""
        from dataclasses import replace

        for config in (QuantConfig(8, 16), QuantConfig(4, 16, False)):
            rounded = {
                name: dequantize(quantize(values, config)) if isinstance(values[0], list) else values
                for name, values in fixture().weights.items()
            }
            from octavo.engine.inference import InferenceEngine

            direct = engine(TINY, quantization=config)
            other = InferenceEngine.from_fixture(replace(fixture(), weights=rounded))
            for item in fixture().scenario["requests"][:4]:
                prompt = item["prompt_token_ids"]
                self.assertEqual(
                    tokens_of(direct, direct.submit(prompt, 8)), tokens_of(other, other.submit(prompt, 8)), config
                )

    def test_int8_keeps_most_golden_tokens(self) -> None:
        running = engine(TINY, quantization=QuantConfig(8, 16))
        same = total = 0
        for item in fixture().scenario["requests"][:6]:
            golden = fixture().golden[item["id"]]["token_ids"]
            tokens = tokens_of(running, running.submit(item["prompt_token_ids"], max(1, len(golden))))
            same += next((i for i, (a, b) in enumerate(zip(tokens, golden, strict=False)) if a != b), len(golden))
            total += len(golden)
        self.assertGreater(same / total, 0.3)

    def test_the_manifest_reports_every_format_of_the_scenario(self) -> None:
        formats = manifest(fixture())["quantization"]
        self.assertEqual([item["bits"] for item in formats], [8, 4])
        for item in formats:
            self.assertGreater(item["bytes_before"], item["bytes_after"])


if __name__ == "__main__":
    unittest.main()
