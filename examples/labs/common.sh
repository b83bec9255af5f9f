# What the labs share: a small corpus, a tiny model, and how it is trained. Sourced, not started.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

OUT=${OUT:-lab-output}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}   # more processes than cores: one thread each
mkdir -p "$OUT"

if [[ ! -e "$OUT/corpus_text_document.idx" ]]; then
  python -m examples.demo.corpus --output-dir "$OUT/corpus"
  python tools/preprocess_data.py --input "$OUT/corpus/valid.jsonl" --output-prefix "$OUT/corpus" \
    --tokenizer-type ByteLevelTokenizer --append-eod
fi

TINY=(
  --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
  --micro-batch-size 2 --global-batch-size 8
  --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2
  --data-path "$OUT/corpus_text_document" --split 90,10,0 --tokenizer-type ByteLevelTokenizer
  --eval-iters 2 --log-interval 5 --device cpu
)

# train PROCESSES FLAG...
train() {
  local processes=$1
  shift
  torchrun --standalone --nproc-per-node "$processes" pretrain_gpt.py "${TINY[@]}" "$@"
}
