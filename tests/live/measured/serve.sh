# simulated: vllm-0.32
vllm serve tiny --host 127.0.0.1 --port 18765 --load-format dummy --dtype bfloat16 --enable-prefix-caching --max-model-len 2048 --max-num-seqs 64 --max-num-batched-tokens 512 --block-size 32 --enforce-eager --no-async-scheduling --kv-cache-memory-bytes 256M
