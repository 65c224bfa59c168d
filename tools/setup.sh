#!/bin/sh
# Finds a Python that Tandem can use and lets tools/setup.py make the environment with it.
# PYTHON names one interpreter; VENV is the folder of the environment.
set -eu

new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
  if ! new_enough "$PYTHON"; then
    printf "setup: '%s' is not Python 3.11 or newer; give another one: make setup PYTHON=/path/to/python3.11\n" "$PYTHON" >&2
    exit 1
  fi
else
  for candidate in python3 python3.11 python3.12 python3.13; do
    if new_enough "$candidate"; then
      PYTHON=$candidate
      break
    fi
  done
  if [ -z "${PYTHON:-}" ]; then
    echo "setup: Tandem needs Python 3.11 or newer and finds none. On Debian 12: apt-get install python3 python3-venv." >&2
    echo "setup: If it is somewhere else, say where: make setup PYTHON=/path/to/python3.11" >&2
    exit 1
  fi
fi

exec "$PYTHON" tools/setup.py "${VENV:-.venv}"
