#!/usr/bin/env bash
# Makes models as the embedded ones were made: corpus, tokenizer, target, draft, evaluation.
# Needs network access to PyPI for the wheels and one CUDA GPU (the target: measured on an H200).
# usage: training/run.sh WORK_FOLDER [TARGET_SECONDS] [DRAFT_STEPS]
set -euo pipefail
work=$1
target_seconds=${2:-280}
draft_steps=${3:-1600}
models=outrider/models/data
python3 -m training.corpus --wheels "$work/wheels" --out "$work/corpus"
python3 -m training.tokenizer --corpus "$work/corpus" --tokenizer $models/target --train \
  --encode "$work/tokens" --prompts $models/heldout_prompts.jsonl --processes "$(nproc)"
python3 -m training.train_target --data "$work/tokens" --out "$work/target" \
  --seconds "$target_seconds" --total-seconds "$target_seconds"
python3 -m training.export --checkpoint "$work/target/target.pt" --out $models/target
python3 -m outrider.train draft_model --target $models/target --out "$work/draft" \
  --data "$work/tokens/mixed.bin" --heldout "$work/tokens/heldout.bin" \
  --generate 16384 --generate-batch 2048 --steps "$draft_steps" --length 2047 \
  --tokens-per-step 98304 --lr 6e-3 --table-lr 6e-3 --mantissa-bits 4 --num-layers 2 \
  --hidden-size 256 --intermediate-size 704 --heads 4 --kv-heads 2 --head-dim 64
cp "$work"/draft/{*.safetensors,*.json,*.jinja} $models/draft
python3 -m training.evaluate --data "$work/tokens" --target $models/target \
  --draft $models/draft --out "$work/evaluation.json"
