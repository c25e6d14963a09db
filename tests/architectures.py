"Tiny random teachers of different architectures, with a tokenizer that spells."

import string
from pathlib import Path
import torch
import transformers as hf
from kinds import one_of_each

WORDS = [
    '[PAD]',
    '[UNK]',
    '[CLS]',
    '[SEP]',
    '[MASK]',
    *(mark + c for mark in ('', '##') for c in string.ascii_lowercase + string.digits),
]
SIZE = dict(
    vocab_size=len(WORDS), hidden_size=32, num_attention_heads=2, intermediate_size=48, initializer_range=0.2
)
TOKENS = dict(pad_token_id=0, bos_token_id=2, eos_token_id=3)
POSITIONS = dict(relative_attention=True, pos_att_type=['c2p', 'p2c'], pooler_hidden_size=32, **TOKENS)


def small_bert(vocab_size: int, **other) -> hf.BertConfig:
    "Two layers of 32 without dropout, where nothing else is said."
    size = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    more = dict(max_position_embeddings=32, initializer_range=0.1)
    dry = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return hf.BertConfig(vocab_size=vocab_size, **size | more | dry | other)


def configs(n_layers: int = 4, dropout: float = 0.1) -> dict:
    "A config of each architecture."
    size = SIZE | dict(num_hidden_layers=n_layers, max_position_embeddings=160)
    drop = dict(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    distil = dict(
        vocab_size=len(WORDS),
        dim=32,
        n_layers=n_layers,
        n_heads=2,
        hidden_dim=48,
        max_position_embeddings=160,
        initializer_range=0.2,
    )
    modern = dict(
        local_attention=8,
        cls_token_id=2,
        sep_token_id=3,
        embedding_dropout=dropout,
        mlp_dropout=dropout,
        attention_dropout=dropout,
    )
    return {
        'bert': hf.BertConfig(**size, **drop),
        'roberta': hf.RobertaConfig(**size, **drop, **TOKENS, type_vocab_size=1),
        'electra': hf.ElectraConfig(**size, **drop, embedding_size=16),
        'distilbert': hf.DistilBertConfig(
            **distil, dropout=dropout, attention_dropout=dropout, seq_classif_dropout=dropout, **TOKENS
        ),
        'mpnet': hf.MPNetConfig(**size, **drop, **TOKENS),
        'deberta': hf.DebertaConfig(**size, **drop, **POSITIONS, type_vocab_size=2),
        'deberta_v2': hf.DebertaV2Config(
            **size,
            **drop,
            **POSITIONS,
            type_vocab_size=0,
            position_buckets=8,
            share_att_key=True,
            norm_rel_ebd='layer_norm',
        ),
        'modernbert': hf.ModernBertConfig(**size, **modern, **TOKENS),
    }


ARCHITECTURES = tuple(configs())
# for `parametrize`: those that are computed alike need not all be tried each time
EACH_ARCHITECTURE = one_of_each(
    ARCHITECTURES,
    lambda kind: {'roberta': 'bert', 'electra': 'bert', 'deberta_v2': 'deberta'}.get(kind, kind),
)
REFUSED = {  # architecture -> a config, words of the refusal
    'albert': (
        hf.AlbertConfig(**SIZE, num_hidden_layers=4, embedding_size=16),
        'has no single list of 4 layers to choose from',
    ),
    't5': (
        hf.T5Config(vocab_size=len(WORDS), d_model=32, d_kv=16, num_layers=4, num_heads=2, d_ff=48),
        'has no single list',
    ),
    'funnel': (
        hf.FunnelConfig(
            vocab_size=len(WORDS), d_model=32, block_sizes=[2, 2], n_head=2, d_head=16, d_inner=48
        ),
        'has no single list of 4 layers',
    ),
    'xlm': (
        hf.XLMConfig(vocab_size=len(WORDS), emb_dim=32, n_layers=4, n_heads=2),
        'has no single list of 4 layers',
    ),
}


def random_model(config, seed: int = 0):
    "A classifier with random weights."
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return hf.AutoModelForSequenceClassification.from_config(config)


def write_teacher(folder: Path, config) -> Path:
    "A random model and its tokenizer."
    folder.mkdir(parents=True)
    (folder / 'vocab.txt').write_text('\n'.join(WORDS))
    tokenizer = hf.BertTokenizerFast.from_pretrained(folder)
    random_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
