"A tokenizer of whole words, and what each of several processes does with it."

from collections.abc import Iterable, Sequence
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from kdnotes.tasks import batching
from kdnotes.tasks.batching import encode_pairs

CHUNK = 4  # rows that are tokenised together
MANY = [' '.join('abcdefgh'[: 1 + i % 8]) for i in range(19)]


def of_words(
    words: Iterable[str],
    special: Sequence[str] = ('[UNK]', '[CLS]', '[SEP]', '[PAD]'),  # in the order of their numbers
    inputs: Sequence[str] = ('input_ids', 'attention_mask'),
) -> PreTrainedTokenizerFast:
    "A whole word is a token; it tells no segments unless it is asked for them, as DistilBERT's."
    vocabulary = {word: i for i, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token='[UNK]'))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single='[CLS] $A [SEP]',
        pair='[CLS] $A [SEP] $B:1 [SEP]:1',
        special_tokens=[(word, vocabulary[word]) for word in ('[CLS]', '[SEP]')],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token='[PAD]',
        unk_token='[UNK]',
        cls_token='[CLS]',
        sep_token='[SEP]',
        model_input_names=list(inputs),
    )


def of_letters(letters: str = 'abcdefgh') -> PreTrainedTokenizerFast:
    "A letter is a token, from 4 on."
    return of_words(letters)


class Counted:
    "A tokenizer that counts the rows of each call, and can stop at one of them."

    def __init__(self, stop_at=None):
        self.inner = of_letters()
        self.stop_at = stop_at
        self.rows = []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, first, second, **more):
        if len(self.rows) == self.stop_at:
            raise KeyboardInterrupt
        self.rows.append(len(first))
        return self.inner(first, second, **more)


def make_tokens(folder):
    "What each of several processes does."
    batching.ROWS_AT_ONCE = CHUNK
    tokenizer = Counted()
    try:
        ids, second = encode_pairs(tokenizer, MANY * 20, MANY * 20, 9, folder)
    except Exception as e:
        return repr(e), '', '', True
    return ids.values.tobytes(), ids.offsets.tobytes(), second.tobytes(), bool(tokenizer.rows)
