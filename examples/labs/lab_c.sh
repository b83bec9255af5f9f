#!/usr/bin/env bash
# Lab C: save at step 100, resume, and see the losses of the run that never stopped.
#
#   bash examples/labs/lab_c.sh
#
# The resumed run is first the same layout (the records are equal to the last digit) and then another
# one (equal to rounding). About three minutes on two CPU cores.
source "$(dirname "$0")/common.sh"
AT=${AT:-100}
STEPS=$((AT + 10))

rm -rf "$OUT"/c_*
TP2=(--tensor-model-parallel-size 2 --sequence-parallel)
PP2=(--pipeline-model-parallel-size 2)
RUN=(--train-iters "$STEPS")
TO=(--save "$OUT/c_checkpoints" --save-interval "$AT")
FROM=(--load "$OUT/c_checkpoints" --ckpt-step "$AT")
train 2 "${RUN[@]}" "${TP2[@]}" "${TO[@]}" --metrics-jsonl "$OUT/c_straight.jsonl"
train 2 "${RUN[@]}" "${TP2[@]}" "${FROM[@]}" --metrics-jsonl "$OUT/c_resumed.jsonl"
train 2 "${RUN[@]}" "${PP2[@]}" "${FROM[@]}" --metrics-jsonl "$OUT/c_other_layout.jsonl"

python -m examples.labs.compare "$OUT/c_straight.jsonl" "$OUT/c_resumed.jsonl" --tolerance 0
python -m examples.labs.compare "$OUT/c_straight.jsonl" "$OUT/c_other_layout.jsonl" --tolerance 1e-5
mcore ckpt verify "$OUT/c_checkpoints" --all
