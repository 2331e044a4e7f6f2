#!/usr/bin/env bash
# Calibrates the first GPU in one call of at most 9 minutes: quick first, so that there is something, then in full.
# Writes to $OUT (default out/device): profiles, raw measurements, reports, a log. Needs PyTorch and infersim's packages.
#   DEVICE=cpu PARTS=quick tests/device/calibrate_h200.sh    # the same without a GPU
#   PARTS=live PROFILE=out/device/full.yaml tests/device/calibrate_h200.sh
# serves a model of Llama-3.1-8B's shapes with this Python's vLLM, in a call of its own: calibrates the server, predicts
# runs that were not used, and prints the errors (tests/live/live.py).
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-out/device}
PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
LIMIT=${LIMIT:-540}
mkdir -p "$OUT"
if [ -d .whl ]; then  # packages carried along, where nothing can be fetched
  "$PYTHON" -m pip install --quiet --no-index --no-deps .whl/*.whl || "$PYTHON" -m pip install --quiet --user --no-index --no-deps .whl/*.whl
fi
"$PYTHON" - <<'CHECK' || exit 2
import importlib.util, sys
missing = [name for name in ("torch", "numpy", "pydantic", "yaml", "typer", "jinja2", "matplotlib") if not importlib.util.find_spec(name)]
sys.exit(f"missing packages: {', '.join(missing)}" if missing else 0)
CHECK
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
calibrate() {
  local name=$1
  shift
  local left=$((LIMIT - SECONDS))
  if [ "$left" -lt "${LEAST:-30}" ]; then echo "$name: no time left"; return 1; fi
  timeout --signal=INT --kill-after=10 "$left" \
    "$PYTHON" -m infersim calibrate device --device "$DEVICE" --out "$OUT/$name.yaml" --force "$@" 2>&1 | tee -a "$OUT/log"
}
status=0
case " ${PARTS:-quick full} " in *" quick "*) calibrate quick --quick || status=1 ;; esac
case " ${PARTS:-quick full} " in *" full "*) calibrate full || status=1 ;; esac
if [[ " ${PARTS:-} " = *" live "* ]]; then
  "$PYTHON" -c 'import vllm' 2> /dev/null || { echo "live: $PYTHON has no vllm; nothing is served"; exit 1; }
  [ -f "${PROFILE:-$OUT/full.yaml}" ] || { echo "live: PROFILE names no file; must be what PARTS=full wrote"; exit 1; }
  mkdir -p "$OUT/live"
  cp "${PROFILE:-$OUT/full.yaml}" "$OUT/live/device.yaml"
  timeout --signal=TERM --kill-after=40 "$((LIMIT - SECONDS))" \
    "$PYTHON" tests/live/live.py "$DEVICE" "$OUT/live" ${RELEASE:-} 2>&1 | tee -a "$OUT/log" || status=1
fi
for profile in full quick; do
  if [ -f "$OUT/$profile.yaml" ]; then
    "$PYTHON" -m infersim show profile "$OUT/$profile.yaml" | tee -a "$OUT/log"
    break
  fi
done
echo "took $SECONDS s; $OUT holds: $(ls "$OUT" | tr '\n' ' ')"
exit $status
