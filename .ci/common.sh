# Functions that .ci/run and .ci/nightly share; sourced from the root of a clone, with $work set.
# shellcheck shell=bash

find_python() { # VERSION -> the path of an interpreter that really is that version
  local candidate
  for candidate in "$(command -v "python$1" || true)" "$(command -v python3 || true)" \
    "$(pyenv root 2>/dev/null || true)"/versions/"$1"*/bin/python; do
    if [[ -n $candidate && -x $candidate ]] &&
      "$candidate" -c "import sys, venv; sys.exit(sys.version_info[:2] != tuple(map(int, '$1'.split('.'))))" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "Python $1 is needed and was found neither on PATH nor below pyenv's root" >&2
  return 1
}

new_venv() { # NAME VERSION -> makes an environment and activates it
  local python
  python=$(find_python "$2")
  "$python" -m venv "$work/$1"
  # shellcheck disable=SC1091
  source "$work/$1/bin/activate"
}

shared_venv() { # NAME VERSION REQUIREMENT -> activates the environment, which the first stage that needs it makes
  if [[ ! -e $work/$1/bin/activate ]]; then
    new_venv "$1" "$2"
    pip install --quiet -c constraints.txt "$3"
  fi
  # shellcheck disable=SC1091
  source "$work/$1/bin/activate"
}

without_skips() { # COMMAND... -> runs pytest; a test that is skipped or deselected is an error
  "$@" | tee "$work/without_skips.txt"
  if grep -qE '^=+ .*(skipped|deselected)' "$work/without_skips.txt"; then
    echo 'tests were left out' && return 1
  fi
}
