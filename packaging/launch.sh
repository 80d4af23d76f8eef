#!/usr/bin/env bash
# Starts Decodeck, and sets it up first where that is still to be done.
set -euo pipefail
# shellcheck source=packaging/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'TEXT'
usage: bash packaging/launch.sh [--model PATH] [OPTION...]
       bash packaging/launch.sh --smoke --out DIR [--model PATH]
       bash packaging/launch.sh COMMAND [ARGUMENT...]

Opens the Decodeck console, which starts an engine with the model on the GPU, or on the CPU where there is none.
The first start makes .venv, installs the pinned packages and the system libraries Qt needs, and downloads the
demo model (93 MB). Later starts install nothing.

  --model PATH   a Hugging Face folder (safetensors) or a GGUF file; the demo model where it is not given
  --smoke        the same without a display: a short load on the real engine, a knob flipped off and on, a snapshot
                 saved and exported, screenshots; prints a summary, exits 0 when every piece works
  --out DIR      where --smoke writes its screenshots and smoke.json
  --setup        set up and end, for machines that are prepared in advance
  -h, --help     this text

Everything else goes to the console as it is; `bash packaging/launch.sh -- --help` lists its options, among them
the commands without a window (snapshot list, show, compare, export, import).

Environment: DECODECK_PYTHON (interpreter for .venv, 3.11 to 3.13), DECODECK_DATA (folder for models and saved
baselines), and everything pip reads (mirror, proxy, certificates).
TEXT
}

model="" needs_model=1 smoke=0
declare -a rest=()
while [[ $# -gt 0 ]]; do
    case "$1" in
        -h | --help)
            usage
            exit 0
            ;;
        --setup) needs_model=setup ;;
        --smoke) smoke=1 ;;
        --model)
            [[ $# -ge 2 ]] || fail "--model needs a path"
            model="$2"
            shift
            ;;
        --model=*) model="${1#*=}" ;;
        --attach | --attach=*)
            needs_model=0
            rest+=("$1")
            ;;
        --)
            shift
            needs_model=0
            rest+=("$@")
            break
            ;;
        -*) rest+=("$1") ;;
        *)
            # The first word that is no option and follows none is a headless command; those need no model.
            [[ ${#rest[@]} -gt 0 ]] || needs_model=0
            rest+=("$1")
            ;;
    esac
    shift
done
[[ -z "$model" || -e "$model" ]] || fail "--model $model: there is no such file or folder"

setup "$ROOT/packaging/requirements.txt"

if [[ -z "$model" && "$needs_model" != 0 ]]; then
    model="$("$PYTHON" -m app.demo_model)" || exit 1
fi
if [[ "$needs_model" == setup ]]; then
    say "set up: $VENV, demo model $model"
    exit 0
fi
[[ -z "$model" ]] || rest+=(--model "$model")
if [[ "$smoke" == 1 ]]; then
    exec "$PYTHON" -m app --smoke "${rest[@]}"
fi
if [[ "$needs_model" == 1 && "$(uname -s)" == Linux && -z "${DISPLAY:-}${WAYLAND_DISPLAY:-}${QT_QPA_PLATFORM:-}" ]]; then
    fail "there is no display here (DISPLAY and WAYLAND_DISPLAY are empty). Use --smoke for a run without one, or
    start the engine here and the console on your own machine (README, \"A remote workstation\")"
fi
exec "$PYTHON" -m app "${rest[@]}"
