#!/usr/bin/env bash
# Measures one NVIDIA GPU in at most eight minutes: parity first, then kernels and models.
#
#   benchmarks/gpu.sh [--output FOLDER]   writes kernels.json and one results.json with report.html for each case
#   benchmarks/gpu.sh --dry-run           the same steps at toy sizes on the CPU, in Triton's interpreter
#
# PYTHON names the interpreter to use.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
cases="model_equals or cuda_graph or 384 or (mlp and 96) or opcheck"

if [[ " $* " == *" --dry-run "* ]]; then
    export TRITON_INTERPRET=1
    cases="test_depthwise_norm and 7 or test_mlp and 40"
fi

echo "== parity: every kernel against the float64 reference =="
timeout 150 "$python" -m pytest -q -p no:cacheprovider tests/ops/triton_cases.py -k "$cases"

echo "== speed =="
timeout 330 "$python" benchmarks/gpu.py "$@"
