#!/usr/bin/env bash
# On a machine with a GPU and no network: build, test, measure. Leaves JSON lines, a table and a
# log; takes less than nine minutes.
#
#   bench/gpu.sh [STAGE ...]     these, in this order, if none is named:
#     build      the native extension; wheels of bench/wheels/ (`make wheels`) for what this Python
#                lacks
#     tests      pytest -m gpu: tests/gpu, then the kernels' (Triton compiles there)
#     copy       copies beside plain pinned ones
#     ops        Triton's kernels beside torch's best
#     linear     the largest single linear, whole and tiled
#     train      1b beside FSDP2 with CPU offload (and DeepSpeed, if it is installed)
#     table      $OUT/table.md from all that is in $OUT/results.jsonl
#   and, by name only, because each takes minutes:
#     train7b    7b, the same
#     largest    as large a model as RAM and drive hold
#
#   OUT=bench/results/gpu   where results.jsonl, table.md, log.txt and tests*.xml go; what is
#                           there is added to
#   SWAP=build/gpu-swap     a directory on a drive      TOTAL_S=520   all stages together
#   PYTHON=python3          one with torch in it        WORKERS=4     pytest processes
#   RAM_GB=, DISK_GB=       what training may use, where the machine does not say it itself
#   DEVICE=cpu              only shows that everything runs
#
# A stage that fails or runs out of its time costs no other stage; the exit status is 1 then.
# 2: nothing could be begun.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
OUT=${OUT:-bench/results/gpu}
SWAP=${SWAP:-build/gpu-swap}
TOTAL_S=${TOTAL_S:-520}
WORKERS=${WORKERS:-4}
SITE=$PWD/build/gpu-site
RESULTS=$OUT/results.jsonl
LOG=$OUT/log.txt
STAGES=("$@")
[ ${#STAGES[@]} -gt 0 ] || STAGES=(build tests copy ops linear train)

export PYTHONPATH=$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONFAULTHANDLER=1
unset TRITON_INTERPRET # on a GPU Triton compiles

mkdir -p "$OUT" "$SWAP" "$SITE" || exit 2
failed=0

say() { printf '%s\n' "$*" | tee -a "$LOG" >&2; }

LACKING="import sys, torch; sys.exit(sys.argv[1] == 'cuda' and not torch.cuda.is_available())"
if ! "$PYTHON" -c "$LACKING" "$DEVICE" 2>>"$LOG"; then
    say "gpu.sh: $PYTHON has no torch that sees a CUDA device: set PYTHON, or DEVICE=cpu for a" \
        "trial on tiny sizes"
    exit 2
fi

case $(stat -f -c %T "$SWAP") in
    tmpfs | ramfs)
        export INFINITY_ALLOW_TMPFS=1
        say "gpu.sh: $SWAP is memory, not a drive: figures with nvme show only that it runs;" \
            "set SWAP" ;;
esac
{ nvidia-smi; uname -a; free -g; df -h "$SWAP"; } >>"$LOG" 2>&1

# stage NAME SECONDS COMMAND...: run it with what is left of its time and of the whole; log it;
# go on whatever happens.
stage() {
    local name=$1 limit=$2 began=$SECONDS status
    shift 2
    local left=$((TOTAL_S - SECONDS))
    [ "$left" -lt "$limit" ] && limit=$left
    if [ "$limit" -lt 5 ]; then
        say "== $name: no time is left"
        status=124
    else
        say "== $name (at most $limit s): $*"
        timeout --signal=TERM --kill-after=15 "$limit" "$@" >>"$LOG" 2>&1
        status=$?
    fi
    [ "$status" -eq 5 ] && [ "$DEVICE" = cpu ] && status=0 # pytest: nothing to run there
    printf '{"script": "stage", "name": "%s", "status": %d, "seconds": %d}\n' \
        "$name" "$status" $((SECONDS - began)) >>"$RESULTS"
    if [ "$status" -ne 0 ]; then
        failed=1
        say "== $name: FAILED with $status after $((SECONDS - began)) s; the end of the log:"
        tail -n 25 "$LOG" >&2
    fi
    return 0
}

# Wheels of packages that this Python has not; none of what it has is replaced.
missing_wheels() {
    "$PYTHON" - bench/wheels/*.whl <<'EOF'
import importlib.metadata
import pathlib
import sys

for path in map(pathlib.Path, sys.argv[1:]):
    if path.is_file():
        try:
            importlib.metadata.distribution(path.name.split("-")[0])
        except importlib.metadata.PackageNotFoundError:
            print(path)
EOF
}

build() {
    local wheels
    mapfile -t wheels < <(missing_wheels)
    if [ ${#wheels[@]} -gt 0 ]; then
        stage wheels 60 "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade \
            --target "$SITE" "${wheels[@]}"
    fi
    stage build 90 "$PYTHON" native/build_native.py
    stage doctor 60 "$PYTHON" -m infinity._src.cli.main doctor
}

tests() {
    local parallel=() marks=gpu
    "$PYTHON" -c "import xdist" 2>/dev/null && [ "$WORKERS" -gt 1 ] &&
        parallel=(-n "$WORKERS" --dist loadfile)
    [ "$DEVICE" = cpu ] && marks="not gpu and not slow and not soak and not deepspeed"
    local common=(-q -m "$marks" -p no:cacheprovider -o faulthandler_timeout=120
        --basetemp="$SWAP/pytest" "${parallel[@]}")
    stage tests 240 "$PYTHON" -m pytest "${common[@]}" --junitxml="$OUT/tests.xml" tests/gpu
    # In a process of its own: one process has Triton's interpreter or its compiler.
    [ -d tests/unit/kernels ] && [ "$DEVICE" = cuda ] &&
        stage tests_ops 120 "$PYTHON" -m pytest "${common[@]}" \
            --junitxml="$OUT/tests_ops.xml" tests/unit/kernels
}

# Each operation by itself: a compiler that hangs or dies costs its own figures only.
operations() {
    if [ ! -f bench/bench_ops.py ] || [ "$DEVICE" = cpu ]; then
        say "== ops: left out (it needs a GPU and bench/bench_ops.py)"
        return
    fi
    local name until=$((SECONDS + 120)) limit
    local cases="import bench_ops; print(*bench_ops.CASES)"
    for name in $(cd bench && "$PYTHON" -c "$cases" 2>>"$LOG"); do
        limit=$((until - SECONDS < 40 ? until - SECONDS : 40))
        stage "ops_$name" "$limit" \
            bash -c '"$1" bench/bench_ops.py --ops "$2" --rounds 10 --json >>"$3"' \
            _ "$PYTHON" "$name" "$RESULTS"
    done
}

train() { # NAME SECONDS OPTIONS...
    local name=$1 limit=$2
    shift 2
    local left=$((TOTAL_S - SECONDS))
    [ "$left" -lt "$limit" ] && limit=$left
    stage "$name" "$limit" "$PYTHON" bench/gpu_train.py --device "$DEVICE" --results "$RESULTS" \
        --dir "$SWAP" --seconds $((limit > 25 ? limit - 20 : limit)) \
        ${RAM_GB:+--ram "$RAM_GB"} ${DISK_GB:+--disk "$DISK_GB"} "$@"
}

for name in "${STAGES[@]}"; do
    case $name in
        build) build ;;
        tests) tests ;;
        copy) stage copy 60 "$PYTHON" bench/gpu_copy.py --device "$DEVICE" --results "$RESULTS" ;;
        ops) operations ;;
        linear) stage linear 75 "$PYTHON" bench/gpu_largest_linear.py --device "$DEVICE" \
            --results "$RESULTS" --seconds 55 ;;
        train) [ "$DEVICE" = cpu ] && size=tiny || size=1b; train train 200 --sizes "$size" ;;
        train7b) train train7b 500 --sizes 7b --rounds 1 ;;
        largest) train largest 500 --sizes largest --rounds 1 --steps 2 ;;
        table) ;;
        *) say "gpu.sh: there is no stage $name; see the first lines of bench/gpu.sh"; exit 2 ;;
    esac
done

"$PYTHON" bench/gpu_table.py "$RESULTS" --junit "$OUT/tests.xml" "$OUT/tests_ops.xml" \
    >"$OUT/table.md" || failed=1
cat "$OUT/table.md"
rm -rf "$SWAP/pytest"
rmdir "$SWAP" 2>/dev/null
say "gpu.sh: $SECONDS s; $OUT/table.md, $RESULTS, $LOG"
exit $failed
