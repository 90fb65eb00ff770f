#!/usr/bin/env bash
# A GPU day in one command: engine, trainer, swap, agreement, quickstart, gsm8k, ranks. Each part is given eight minutes.
#   tools/gpu_day.sh [PART…]     leaves PART.json, PART.log and table.md (that of docs/gpu.md) in runs/gpu_day, or in $GPU_DAY_OUT
# It uses what is installed there and says what is missing. $PYTHON names the interpreter: .venv's, else python3.
# Exits with 3 where there is no GPU, with 1 where a part failed; the others are measured all the same.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${GPU_DAY_OUT:-runs/gpu_day}
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(engine trainer swap agreement quickstart gsm8k ranks)
mkdir -p "$out"
failed=()
for part in "${parts[@]}"; do
  printf '\n== %s (%ss)\n' "$part" "$SECONDS"
  PYTHONUNBUFFERED=1 timeout -k 10 "${GPU_DAY_PART_S:-480}" "$python" tools/bench/gpu.py "$part" --out "$out" 2>&1 | tee "$out/$part.log"
  code=${PIPESTATUS[0]}
  case $code in
    0) ;;
    3) exit 3 ;;
    124) failed+=("$part took longer than ${GPU_DAY_PART_S:-480} s") ;;
    *) failed+=("$part ended with $code: $out/$part.log") ;;
  esac
done
printf '\n'
[ ! -f "$out/table.md" ] || cat "$out/table.md"
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
