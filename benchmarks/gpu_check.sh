#!/usr/bin/env bash
# Builds the operators for the GPU at hand, then tests, checks and measures them: see --help.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: benchmarks/gpu_check.sh [--quick] [--dry-run] [--steps A,B] [--minutes N] [--commit NAME]

Builds the package for the architecture of the GPU of this machine, runs every test of the CUDA operators,
compute-sanitizer and the benchmarks, and writes what came of it to $OUT (default: build/gpu_check):
report.md, report.json, bench.jsonl and a log for each kind of step. Needs no network.

  --quick        fewer tests, two of the four sanitizers, few benchmark points
  --dry-run      needs no GPU: runs what a CPU can, in tiny sizes, and skips the rest
  --steps A,B    only these of: facts build cases tests tests-device bench memcheck racecheck
                 initcheck synccheck (without build, the last one's package is used)
  --minutes N    time for everything, default 8; the report is whole whenever the time is over
  --commit NAME  what the report says where there is no git repository

Environment: PYTHON (default python3; with torch, pytest, cmake, ninja, pybind11), OUT. Wheels in .whl/ are
put beside the package (nlohmann-json, where the machine has none). Steps that fail do not stop the others;
the exit status is 1 if any failed, 2 if the check could not begin.
EOF
}

known=,facts,build,cases,tests,tests-device,bench,memcheck,racecheck,initcheck,synccheck,
refuse() {
  echo "gpu_check.sh: $*" >&2
  exit 2
}

quick='' dry_run='' steps='' minutes=8 commit=${H2O_COMMIT:-}
while (($#)); do
  case $1 in
    --quick) quick=1 ;;
    --dry-run) dry_run=1 ;;
    --steps | --minutes | --commit)
      (($# > 1)) || refuse "$1 needs a value"
      case $1 in
        --steps) steps=,$2, ;;
        --minutes) minutes=$2 ;;
        --commit) commit=$2 ;;
      esac
      shift
      ;;
    --help | -h) usage; exit 0 ;;
    *) refuse "unknown option $1; see --help" ;;
  esac
  shift
done
[[ $minutes =~ ^[0-9]+$ ]] || refuse "--minutes must be a whole number, got $minutes"
for name in ${steps//,/ }; do
  [[ $known == *,$name,* ]] || refuse "--steps must be of ${known//,/ }, got $name"
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
out=$(realpath -m "${OUT:-build/gpu_check}")
work=$root/build/gpu_check_work  # builds and what steps hand to the report
python=${PYTHON:-python3}
PATH=$PATH:/usr/local/cuda/bin
if [[ -n $dry_run ]]; then work=$out.work; fi
mkdir -p "$out" "$work"
for name in facts build tests sanitizers bench; do rm -f "$out/$name.log"; done
rm -f "$out"/{report.md,report.json,bench.jsonl} "$work"/{facts,steps}.json "$work"/tests*.xml

arch=none
if [[ -z $dry_run ]]; then
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1) || true
  if [[ ! $capability =~ ^[0-9]+\.[0-9]+$ ]]; then
    refuse "nvidia-smi finds no NVIDIA GPU here; --dry-run needs none"
  fi
  arch=${capability/./}-real
  export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
fi
if [[ -z $commit ]]; then
  commit=$(git describe --always --dirty --abbrev=10 2>/dev/null) || commit=unknown
fi
export H2O_COMMIT=$commit PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=passive
export root out work python quick dry_run arch

deadline=$((SECONDS + minutes * 60))
most_log_bytes=1800000
failed=0

report() { "$python" benchmarks/gpu_report.py --out "$out" --work "$work" "$@"; }

# step NAME LOG SECONDS COMMAND...: runs a function with a limit in time. Exit status 77: skipped, and the
# last line says why. RESERVE seconds are left for the steps that follow.
step() {
  local name=$1 log=$out/$2.log limit=$3 rc=0 begin=$SECONDS status detail=''
  shift 3
  [[ -z $steps || $steps == *,$name,* ]] || return 0
  local left=$((deadline - SECONDS - reserve))
  ((limit <= left)) || limit=$left
  report step "$name" running 0 ''
  echo "=== $name" >>"$log"
  if ((limit < 5)); then
    status=failed detail="not run: the $minutes minutes are over"
  else
    seconds=$limit timeout --signal=INT --kill-after=10 "$limit" \
      bash -euo pipefail -c '"$@"' step "$@" >>"$log" 2>&1 </dev/null || rc=$?
    case $rc in
      0) status=passed ;;
      77) status=skipped ;;
      124 | 137) status=failed detail="over its limit of $limit s; " ;;
      *) status=failed detail="exit status $rc; " ;;
    esac
    detail+=$(tail -c 4000 "$log" | grep -av '^[[:space:]]*$' | tail -n 1 | cut -c 1-300) || true
    detail=${detail#skipped: }
  fi
  if (($(stat -c %s "$log") > most_log_bytes)); then
    tail -c $most_log_bytes "$log" >"$work/log" && mv "$work/log" "$log"
  fi
  [[ $status != failed ]] || failed=1
  report step "$name" "$status" $((SECONDS - begin)) "$detail"
  printf '%-13s %-8s %4d s  %s\n' "$name" "$status" $((SECONDS - begin)) "$detail"
}

run() {
  echo "+ $*"
  [[ -n $dry_run ]] || "$@"
}
skip() {
  echo "skipped: $*"
  exit 77
}
needs_package() {
  [[ -n $dry_run || -e $work/site/h2o_kv/libh2o.so ]] && return
  echo "there is no package, see the step build"
  exit 1
}

facts() {
  nvidia-smi || echo "nvidia-smi: no GPU"
  nvidia-smi -q -d CLOCK,POWER,MEMORY,PERFORMANCE || echo "nvidia-smi: no GPU"
  report facts --commit "$H2O_COMMIT"
  echo
  echo "commit $H2O_COMMIT"
}

build() {
  local site=$work/site options
  options="-DH2O_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=$arch -DCMAKE_CUDA_FLAGS='-lineinfo -Xptxas=-v'"
  local install=(-m pip install --disable-pip-version-check --no-index --no-deps --no-compile --upgrade)
  run rm -rf "$site" "$work/build.json"
  if compgen -G '.whl/*.whl' >/dev/null; then
    run "$python" "${install[@]}" --quiet --target "$site" .whl/*.whl
  fi
  run env CMAKE_ARGS="$options" H2O_BUILD_DIR="$work/cmake" MAX_JOBS="$(nproc)" \
    "$python" "${install[@]}" --verbose --no-build-isolation --target "$site" .
  run report build --library "$site/h2o_kv/libh2o.so" --arch "$arch"
  [[ -z $dry_run ]] || skip "a dry run builds nothing"
}

cases() {
  needs_package
  local options=()
  [[ -z $quick ]] || options+=(--quick)
  [[ -z $dry_run ]] || options+=(--device cpu)
  "$python" benchmarks/gpu_cases.py "${options[@]}"
}

# tests NAME PYTEST_ARGUMENT...: those that take the fixture `device`, on the GPU.
tests() {
  needs_package
  local results=$work/$1.xml jobs=$(($(nproc) < 12 ? $(nproc) : 12))
  local options=(-p no:cacheprovider -m cuda --junitxml "$results" --durations 10)
  shift
  if [[ -n $dry_run ]]; then
    options+=(--collect-only --quiet --quiet)
  elif "$python" -c 'import xdist' 2>/dev/null; then
    options+=(-n "$jobs")
  fi
  OMP_NUM_THREADS=1 "$python" -m pytest "${options[@]}" "$@"
  [[ -n $dry_run ]] || report tests "$results"
}

sanitizer() {
  needs_package
  local tool=$1 rc=0 refusal=''
  local options=(--target-processes all --error-exitcode 9 --print-limit 20)
  command -v compute-sanitizer >/dev/null || skip "compute-sanitizer is not on PATH"
  # The others must see every kernel: what torch's write is read by ours.
  case $tool in racecheck | synccheck) options+=(--kernel-name kernel_substring=h2o) ;; esac
  # Without torch's caching each tensor is an allocation of its own, whose end the tools know.
  env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool "$tool" "${options[@]}" "$python" benchmarks/gpu_cases.py --quick \
    2>&1 | tee "$work/$tool" || rc=$?
  refusal=$(grep -am 1 -iE 'device (is )?not supported|error 999|failed to initialize' "$work/$tool") ||
    true
  [[ -z $refusal ]] || skip "compute-sanitizer refuses: $refusal"
  grep -aE '(ERROR|RACECHECK) SUMMARY' "$work/$tool" || { echo "$tool gave no summary"; exit 1; }
  return $rc
}

bench() {
  needs_package
  local options=(--output "$out/bench.jsonl" --seconds $((seconds > 40 ? seconds - 25 : seconds / 3)))
  [[ -z $quick ]] || options+=(--quick)
  [[ -z $dry_run ]] || options+=(--device cpu --tiny)
  "$python" benchmarks/bench_gpu.py "${options[@]}"
}
export -f report run skip needs_package facts build cases tests sanitizer bench

reserve=0
step facts facts 40 facts
reserve=60
step build build 270 build
step cases tests 60 cases
step tests tests 120 tests tests tests/python/test_cuda.py
if [[ -z $quick ]]; then
  step tests-device tests 120 tests tests-device tests/python --ignore tests/python/test_cuda.py
fi
tools=(memcheck racecheck)
[[ -n $quick ]] || tools+=(initcheck synccheck)
for tool in "${tools[@]}"; do step "$tool" sanitizers 45 sanitizer "$tool"; done
reserve=5
step bench bench 150 bench

sed -n '/^Targets/,/^```/p' "$out/report.md" | sed '$d'
echo "report: $out/report.md"
exit $failed
