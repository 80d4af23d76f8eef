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
  --draft-model PATH
                 a smaller model with the same tokenizer, which “Speculation: draft” drafts with
  --smoke        the same without a display: a short load on the real engine, a knob flipped off and on, a snapshot
                 saved and exported, screenshots; prints a summary, exits 0 when every piece works
  --out DIR      where --smoke writes its screenshots and smoke.json
  --setup        set up and end, for machines that are prepared in advance
  -h, --help     this text

Everything else goes on as it is: `-- --console-help` lists the window's other options, `-- --help` the commands
without a window (snapshot list, show, compare, export, import).

Environment: DECODECK_PYTHON (interpreter for .venv, 3.11 to 3.13), DECODECK_DATA (folder for models and saved
baselines), and everything pip reads (mirror, proxy, certificates).
TEXT
}

mode=window model="" draft="" wants_model=1
declare -a rest=()
while [[ $# -gt 0 ]]; do
    case "$1" in
        -h | --help)
            usage
            exit 0
            ;;
        --setup) mode=setup ;;
        --smoke) mode=smoke ;;
        --model)
            [[ $# -ge 2 ]] || fail "--model needs a path"
            model="$2"
            shift
            ;;
        --model=*) model="${1#*=}" ;;
        --draft-model)
            [[ $# -ge 2 ]] || fail "--draft-model needs a path"
            draft="$2"
            shift
            ;;
        --draft-model=*) draft="${1#*=}" ;;
        --data-dir)
            [[ $# -ge 2 ]] || fail "--data-dir needs a folder"
            export DECODECK_DATA="$2"
            shift
            ;;
        --data-dir=*) export DECODECK_DATA="${1#*=}" ;;
        --attach | --attach=* | --no-engine)
            wants_model=0
            rest+=("$1")
            ;;
        --)
            shift
            mode=command
            rest+=("$@")
            break
            ;;
        -*) rest+=("$1") ;;
        *)
            # A word before any option is a command without a window; later ones belong to options.
            [[ ${#rest[@]} -gt 0 ]] || mode=command
            rest+=("$1")
            ;;
    esac
    shift
done
[[ -z "$model" || -e "$model" ]] || fail "--model $model: there is no such file or folder"
[[ -z "$draft" || -e "$draft" ]] || fail "--draft-model $draft: there is no such file or folder"
if [[ "$mode" == window && "$(uname -s)" == Linux && -z "${DISPLAY:-}${WAYLAND_DISPLAY:-}${QT_QPA_PLATFORM:-}" ]]; then
    fail "there is no display here (DISPLAY and WAYLAND_DISPLAY are empty). Use --smoke for a run without one, or
    start the engine here and the console on your own machine (README, \"A remote workstation\")"
fi

setup "$ROOT/packaging/requirements.txt"

if [[ "$mode" != command && "$wants_model" == 1 && -z "$model" ]]; then
    model="$("$PYTHON" -m app.demo_model)" || exit 1
fi
case "$mode" in
    setup)
        say "set up: $VENV${model:+, model $model}"
        exit 0
        ;;
    smoke) rest=(--smoke "${rest[@]}") ;;
esac
[[ -z "$model" ]] || rest+=(--model "$model")
[[ -z "$draft" ]] || rest+=(--draft-model "$draft")
exec "$PYTHON" -m app "${rest[@]}"
