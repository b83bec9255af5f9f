#!/usr/bin/env bash
# GPT-3 13B on 8 machines of 8 GPUs: tensor 4 x pipeline 2 x data 8.
#
# Start it once on every machine (or let train.slurm do that):
#
#   MASTER_ADDR=first-machine DATA=data/corpus_text_document bash examples/gpt3_13b/train.sh
#
# The same command resumes. docs/launching.md explains every flag.
set -euo pipefail
cd "$(dirname "$0")/../.."

: "${MASTER_ADDR:?the name of the first machine}"
: "${DATA:?prefix of a .bin/.idx pair}"
TOKENIZER=${TOKENIZER:-tokenizer}      # folder with vocab.json and merges.txt
SAVE=${SAVE:-checkpoints/gpt3_13b}     # all machines see it
NNODES=${NNODES:-8}
GPUS=${GPUS:-8}

# Of a signal on, torchrun gives its workers so long to save; a version before 2.13 gives them 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-170}

LAUNCH=(
  --nnodes "$NNODES" --nproc-per-node "$GPUS" --max-restarts 3
  --rdzv-id "${JOB_ID:-gpt3_13b}" --rdzv-backend c10d
  --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}"
)
MODEL=(
  --num-layers 40 --hidden-size 5120 --num-attention-heads 40
  --seq-length 2048 --max-position-embeddings 2048
)
PARALLEL=(
  --tensor-model-parallel-size 4 --sequence-parallel
  --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
BATCH=(
  --micro-batch-size 2 --global-batch-size 1024
  --train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105
  --bf16 --recompute-granularity selective
)
OPTIMIZER=(
  --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
  --hidden-dropout 0.1 --attention-dropout 0.1 --init-method-std 0.008
)
DATA_FLAGS=(
  --data-path "$DATA" --split 969,30,1
  --tokenizer-type GPT2BPETokenizer
  --vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt"
)
OUTPUT=(
  --save "$SAVE" --load "$SAVE" --save-interval 500 --async-save --keep-latest 3
  --eval-interval 500 --eval-iters 20 --log-interval 10
  --metrics-jsonl "$SAVE/records.jsonl"
)
exec torchrun "${LAUNCH[@]}" pretrain_gpt.py "${MODEL[@]}" "${PARALLEL[@]}" "${BATCH[@]}" \
  "${OPTIMIZER[@]}" "${DATA_FLAGS[@]}" "${OUTPUT[@]}" "$@"
