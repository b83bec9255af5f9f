#!/usr/bin/env bash
# Llama 3 8B on one machine of 8 GPUs: tensor 4 x data 2.
#
#   DATA=data/corpus_text_document TOKENIZER=Meta-Llama-3-8B bash examples/llama3_8b/train.sh
#
# That trains from random weights. To go on from the published ones, convert them first:
#
#   mcore convert hf-to-mcore --hf Meta-Llama-3-8B --save checkpoints/llama3_8b_hf
#   START=checkpoints/llama3_8b_hf DATA=... TOKENIZER=... bash examples/llama3_8b/train.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

: "${DATA:?prefix of a .bin/.idx pair}"
: "${TOKENIZER:?folder with tokenizer.json}"
SAVE=${SAVE:-checkpoints/llama3_8b}
GPUS=${GPUS:-8}

MODEL=(
  --num-layers 32 --hidden-size 4096 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --ffn-hidden-size 14336
  --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear
  --position-embedding-type rope --rotary-base 500000
  --untie-embeddings-and-output-weights --vocab-size 128256
  --seq-length 8192 --max-position-embeddings 8192
  --hidden-dropout 0 --attention-dropout 0
)
PARALLEL=(
  --tensor-model-parallel-size 4 --sequence-parallel
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
BATCH=(
  --micro-batch-size 1 --global-batch-size 128 --train-iters 10000
  --bf16 --recompute-granularity selective
)
OPTIMIZER=(
  --lr 3e-5 --min-lr 3e-6 --lr-decay-style cosine --lr-warmup-iters 200
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
)
DATA_FLAGS=(
  --data-path "$DATA" --split 99,1,0
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
)
OUTPUT=(
  --save "$SAVE" --save-interval 500 --async-save --keep-latest 2
  --eval-interval 500 --eval-iters 10 --log-interval 10
)
# The first start takes the weights alone; every later one continues the run.
if [[ -n "${START:-}" && ! -e "$SAVE/latest_checkpointed_iteration.txt" ]]; then
  OUTPUT+=(--load "$START" --finetune)
else
  OUTPUT+=(--load "$SAVE")
fi
exec torchrun --standalone --nproc-per-node "$GPUS" pretrain_gpt.py "${MODEL[@]}" \
  "${PARALLEL[@]}" "${BATCH[@]}" "${OPTIMIZER[@]}" "${DATA_FLAGS[@]}" "${OUTPUT[@]}" "$@"
