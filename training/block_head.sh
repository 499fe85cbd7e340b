#!/usr/bin/env bash
# Makes the embedded target's dspark head as it was made, after the first two steps of run.sh.
# Needs one CUDA GPU (measured on an H200) for nine minutes. Writes WORK_FOLDER/dspark.
# usage: training/block_head.sh WORK_FOLDER [SEED]
set -euo pipefail
work=$1
seed=${2:-1}
python3 -m outrider.train responses --target embedded --data "$work/tokens/mixed.bin" \
  --count 16384 --seed "$seed" --generate-batch 2048 --prompt-length 256 --new-tokens 257 \
  --out "$work/own.npy"
python3 -m outrider.train dspark --target embedded --data "$work"/tokens/mixed.bin "$work/own.npy" \
  --heldout "$work/tokens/heldout.bin" --out "$work/dspark" --seed "$seed" --seconds 429 \
  --length 512 --tokens-per-step 16384 --num-draft-tokens 16 --lr 5e-3 --table-lr 5e-3 \
  --mantissa-bits 4 --num-layers 4 --heads 12 --kv-heads 6 --head-dim 64 \
  --intermediate-size 1024 --markov-rank 128 --prompt-length 256 --new-tokens 257
