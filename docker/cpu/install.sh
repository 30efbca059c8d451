#!/bin/sh
# The steps of the CPU image; docker/replay.sh runs them without a Docker engine.
# usage: install.sh FOLDER_WITH_THE_WHEEL EXTRAS
set -eu

wheel=$(ls "$1"/horo_lite-*.whl)
python3 -m pip install --no-cache-dir "horo_lite[$2] @ file://$wheel"
useradd --create-home --uid 1000 trainer
