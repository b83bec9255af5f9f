#!/usr/bin/env bash
# Lab B: one model in one process and on four (tensor 2 x pipeline 2). The losses agree.
#
#   bash examples/labs/lab_b.sh
#
# About two minutes on two CPU cores.
source "$(dirname "$0")/common.sh"
STEPS=${STEPS:-20}

rm -f "$OUT"/b_*.jsonl
train 1 --train-iters "$STEPS" --metrics-jsonl "$OUT/b_one.jsonl"
train 4 --train-iters "$STEPS" --metrics-jsonl "$OUT/b_four.jsonl" \
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel
python -m examples.labs.compare "$OUT/b_one.jsonl" "$OUT/b_four.jsonl" --tolerance 1e-5
