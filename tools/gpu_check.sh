#!/usr/bin/env bash
# What only a GPU can show: the tests marked `gpu`, and two race checkers.
#
#     tools/gpu_check.sh OUT [SHARDS]
#
# The tests may run in several processes side by side, since most of their time is
# Python's. On some virtual machines the driver refuses memory for a moment, with "invalid
# argument", and more often so with several processes: one by itself is the default, and
# what failed has a second try, which is reported.
# OUT gets a log a shard, the checkers' reports, and all of it in gpu-check.json.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1 shards=${2:-1} python=${PYTHON:-python3}
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
mkdir -p "$out"
pytest=("$python" -m pytest -q --tb=short -p no:cacheprovider)
list=$(mktemp -d)

"${pytest[@]}" --collect-only -m gpu tests | grep :: >"$list/all"
# Those that hold streams up on purpose need the GPU for themselves.
grep -v test_races "$list/all" | split -n "r/$shards" - "$list/shard."
for shard in "$list"/shard.*; do
  timeout 420 "${pytest[@]}" -m gpu "@$shard" >"$out/tests-${shard##*.}.log" 2>&1 &
done
wait
timeout 120 "${pytest[@]}" -m gpu tests/test_races.py >"$out/tests-races.log" 2>&1

# PyTorch's sanitizer sees operators with their streams: the shipped schedule, then
# each edge dropped.
for edge in "" h2d_done compute_done slot_reuse compute_order block_lease; do
  TORCH_CUDA_SANITIZER=1 timeout 120 "$python" -m tests.sanitized_run $edge \
    >"$out/sanitizer-${edge:-none}.json" 2>"$out/sanitizer-${edge:-none}.log" &
done
# NVIDIA's sees the memory of kernels, Triton's too.
for tool in memcheck racecheck; do
  timeout 240 compute-sanitizer --tool "$tool" --target-processes all \
    "${pytest[@]}" tests/test_triton.py >"$out/compute-$tool.log" 2>&1 &
done
wait

grep -hoP "^(FAILED|ERROR) \K\S+(?= - |$)" "$out"/tests-*.log >"$out/failed.txt"
: >"$out/failed-twice.txt"
if [ -s "$out/failed.txt" ]; then
  timeout 240 "${pytest[@]}" "@$out/failed.txt" >"$out/again.log" 2>&1
  grep -hoP "^(FAILED|ERROR) \K\S+(?= - |$)" "$out/again.log" >"$out/failed-twice.txt"
fi
PYTHONPATH=. "$python" tools/gpu_summary.py "$out"
