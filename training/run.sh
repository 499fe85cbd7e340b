#!/usr/bin/env bash
# Reproduces the embedded models: corpus, tokenizer, target, draft, evaluation, export.
# Needs network access to PyPI for the wheels and one CUDA GPU (measured on an H200).
# usage: training/run.sh WORK_FOLDER [TARGET_SECONDS] [DRAFT_SECONDS]
set -euo pipefail
work=$1
target_seconds=${2:-280}
draft_seconds=${3:-125}
tokenizer=outrider/models/data/target
python3 -m training.corpus --wheels "$work/wheels" --out "$work/corpus"
python3 -m training.tokenizer --corpus "$work/corpus" --tokenizer "$tokenizer" --train \
  --encode "$work/tokens" --prompts outrider/models/data/heldout_prompts.jsonl \
  --processes "$(nproc)"
python3 -m training.train_target --data "$work/tokens" --out "$work/models" \
  --seconds "$target_seconds" --total-seconds "$target_seconds"
python3 -m training.distil_draft --data "$work/tokens" --out "$work/models" \
  --seconds "$draft_seconds"
python3 -m training.evaluate --data "$work/tokens" --out "$work/models"
python3 -m training.export --checkpoints "$work/models" --tokenizer "$tokenizer" \
  --out outrider/models/data
