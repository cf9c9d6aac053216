"""What the native library shows, needs and may use, table by table; and the package without a compiler."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from octavo.backends import create_backend, native_build, native_lib
from octavo.cli import doctor

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = ROOT / "build/native/CMakeFiles/octavo_objects.dir/src"
# registers and instructions that a table (or, under "runtime", everything else) must not hold
WIDE, TILES, DOTS = r"%zmm|%[yx]mm(1[6-9]|2\d|3[01])|%k[1-7]\b", r"%tmm|\btile", r"\bv?p?dpbusd|\bdpbf16|\bvdpbf16"
ARM_DOTS, ARM_MATRIX = r"\b[us]dot\b", r"\b(usdot|[us]s?mmla|bf(dot|mmla|cvt))\b"
FORBIDDEN = {
    "generic": rf"%ymm|{WIDE}|{TILES}|\bv[a-z]+ps\b|{ARM_DOTS}|{ARM_MATRIX}",
    "avx2": rf"{WIDE}|{TILES}|{DOTS}",
    "avx2_vnni": rf"{WIDE}|{TILES}|\bvdpbf16|(?<!\{{vex\}} )vpdpbusd",
    "avx512": rf"{TILES}|{DOTS}",
    "avx512_vnni_bf16": TILES,
    "amx": None,
    "neon": rf"{ARM_DOTS}|{ARM_MATRIX}",
    "neon_dotprod": ARM_MATRIX,
    "neon_i8mm": None,
}
# the products that a table exists for
DOTS_OF = {
    "avx2": ("vpmaddubsw", "vfmadd"),
    "avx2_vnni": ("{vex} vpdpbusd", "vfmadd"),
    "avx512": ("vpmaddubsw", "vfmadd"),
    "avx512_vnni_bf16": ("vpdpbusd", "vdpbf16ps"),
    "amx": ("tdpbsud", "tdpbf16ps", "vpdpbusd", "vdpbf16ps"),
    "neon_dotprod": ("sdot",),
    "neon_i8mm": ("usdot", "bfdot"),
}


def printed(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def tables() -> tuple[str, ...]:
    build = native_build.read_build()
    assert build is not None, "the library is not built: make native"
    return build.tables


def test_the_library_shows_the_c_abi_alone() -> None:
    header = (ROOT / "native/include/octavo_native.h").read_text()
    declared = set(re.findall(r"OCTAVO_API [^;(]*?\b(octavo_\w+)\(", header))
    lines = printed("nm", "-D", "--defined-only", str(native_lib.library_path())).splitlines()
    assert {line.split()[-1].split("@")[0] for line in lines} == declared and len(declared) > 20


def test_the_library_needs_the_c_library_alone() -> None:
    needed = re.findall(r"NEEDED\s+(\S+)", printed("objdump", "-p", str(native_lib.library_path())))
    assert needed and {name.split(".so")[0] for name in needed} <= {"libc", "libm", "libpthread"} | {
        name.split(".so")[0] for name in needed if name.startswith("ld-linux")
    }


@pytest.mark.parametrize("table", ["runtime", *FORBIDDEN])
def test_a_table_uses_its_own_instructions_alone(table: str) -> None:
    if table == "runtime":
        paths = [path for path in OBJECTS.glob("*.o") if not path.name.startswith("kernels_")]
    else:
        paths = [OBJECTS / f"kernels_{table}.cpp.o"] if table in tables() else []
    pattern = FORBIDDEN["generic" if table == "runtime" else table]
    code = [line for path in paths for line in printed("objdump", "-d", "--no-show-raw-insn", str(path)).splitlines()]
    found = [line for line in code if pattern and "\t" in line and re.search(pattern, line.split("\t", 1)[1])]
    assert not found, found[:3]
    missing = [dot for dot in DOTS_OF.get(table, ()) if paths and not any(dot in line for line in code)]
    assert not missing
    assert code or table not in (*tables(), "runtime")


def test_every_source_of_a_table_is_built_or_of_another_architecture() -> None:
    named = {path.stem.removeprefix("kernels_") for path in (ROOT / "native/src").glob("kernels_*.cpp")}
    arm = {name for name in named if name.startswith("neon")}
    x86 = named - arm - {"generic"}
    ours = x86 if sysconfig.get_platform().endswith("x86_64") else arm
    assert set(tables()) == ours | {"generic"} and named <= set(FORBIDDEN)


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it installs without a compiler, unpacked."""
    folder = tmp_path_factory.mktemp("pure")
    code = f"from scikit_build_core.build import build_wheel; build_wheel({str(folder)!r})"
    broken = os.environ | {"CXX": "/bin/false", "CC": "/bin/false"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=broken, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "_native/" in name]
        archive.extractall(folder / "site")
    return folder / "site"


def run_pure(pure: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run with the unpacked package first and without the editable one."""
    path = os.pathsep.join([str(pure), sysconfig.get_path("purelib")])
    env = {"PYTHONPATH": path, "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    return subprocess.run([sys.executable, "-S", "-c", code], env=env, check=True, capture_output=True, text=True)


def test_without_a_compiler_the_package_is_pure_python_and_says_so_once(pure: Path) -> None:
    code = """
import octavo
from octavo.backends import available_backends, create_backend
print(octavo.__file__, available_backends(), *(create_backend(name).name for name in ("auto", "auto", "numpy")))
"""
    ran = run_pure(pure, code)
    assert ran.stdout.split() == [f"{pure}/octavo/__init__.py", "('reference',", "'numpy')", "numpy", "numpy", "numpy"]
    assert ran.stderr.count("\n") == 1 and "native backend is not available" in ran.stderr
    assert "pip install" in ran.stderr
    assert run_pure(pure, "from octavo.backends import create_backend; create_backend('numpy')").stderr == ""


def doctor_finds() -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor._native()}


def test_doctor_says_which_table_runs() -> None:
    found = doctor_finds()
    isa, threads = found["native kernels"].found.split(", ")
    assert isa == create_backend("native").engine.isa and int(threads.split()[0]) >= 1
    assert all(name in found["kernel tables"].found for name in tables()) and found["huge pages"].found
    assert not found["native kernels"].remedy


def test_doctor_says_why_there_is_no_library_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "liboctavo_native.so"
    monkeypatch.setenv("OCTAVO_NATIVE_LIBRARY", str(place))
    monkeypatch.setattr(native_build, "compilers", lambda: ())
    found = doctor_finds()["native kernels"]
    assert "without a C++ compiler" in found.found and "apt install g++" in found.remedy
    assert "make native" in found.remedy and not found.fatal
    monkeypatch.setattr(native_build, "compilers", lambda: ("g++",))
    found = doctor_finds()["native kernels"]
    assert "not built" in found.found and "make native" in found.remedy and "apt" not in found.remedy
    place.write_bytes(b"no library")
    found = doctor_finds()["native kernels"]
    assert "cannot be loaded" in found.found and "build it again" in found.remedy


@pytest.mark.parametrize(
    ("state", "name"), [("always [madvise] never", "madvise"), ("always madvise [never]", "never")]
)
def test_huge_pages(tmp_path: Path, state: str, name: str) -> None:
    (tmp_path / "enabled").write_text(state)
    found = doctor._huge_pages(tmp_path / "enabled")
    assert found.found == name and bool(found.remedy) == (name == "never")
    assert doctor._huge_pages(tmp_path / "none").found.startswith("unknown")


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"tables": 3, "compiler": "x", "sanitize": ""})])
def test_a_spoilt_record_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "build.json").write_text(text)
    assert native_build.read_build(tmp_path / "liboctavo_native.so") is None
