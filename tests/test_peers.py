"""What other packages compute, where they are installed: losses with their gradients, pseudo-log-likelihoods.
trec_eval's numbers are in test_ranking_metrics.py, the official SQuAD script's in test_extractive_qa.py.
"""

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from tiny_lm import WORDS, tiny_lm, tiny_tokenizer
from kdnotes.experiment.score import score
from kdnotes.losses.conventions import dialect_loss

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings('default')]
T = 4.0


def gradient(loss_of) -> tuple[float, np.ndarray]:
    "A loss of 32 rows of 5 classes, and what it does to the student."
    generator = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(32, 5, generator=generator) for _ in range(2))
    labels = torch.randint(5, (32,), generator=generator)
    loss = loss_of(student.requires_grad_(), teacher, labels)
    loss.backward()
    return loss.item(), student.grad.numpy()


def assert_same(ours, theirs) -> None:
    (loss, slope), (their_loss, their_slope) = gradient(ours), gradient(theirs)
    assert loss == pytest.approx(their_loss, rel=3e-7)
    np.testing.assert_allclose(slope, their_slope, rtol=1e-5, atol=3e-7)


def test_textbrewer():
    losses = pytest.importorskip('textbrewer.losses', reason='the package textbrewer is not installed')
    weights = dict(hard_label_weight=0.25, kd_loss_weight=0.75)
    assert_same(
        lambda s, t, labels: dialect_loss('textbrewer', s, t, labels, T, weights),
        lambda s, t, labels: (
            0.25 * torch.nn.functional.cross_entropy(s, labels) + 0.75 * losses.kd_ce_loss(s, t, T)
        ),
    )


@pytest.mark.parametrize('weights', [dict(alpha=0.25), dict(alpha=0.25, beta=3.0), dict(alpha=0.0)])
def test_torchdistill(weights):
    mid_level = pytest.importorskip(
        'torchdistill.losses.mid_level', reason='the package torchdistill is not installed'
    )
    theirs = mid_level.KDLoss('out', 'output', 'out', 'output', T, **weights)
    assert_same(
        lambda s, t, labels: dialect_loss('torchdistill', s, t, labels, T, weights),
        lambda s, t, labels: theirs(dict(out=dict(output=s)), dict(out=dict(output=t)), labels),
    )


def test_minicons(tmp_path, monkeypatch):
    "Each token of each line, hidden by itself."
    scorer = pytest.importorskip('minicons.scorer', reason='the package minicons is not installed')
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    rng = np.random.default_rng(0)
    lines = [' '.join(f'w{k}' for k in rng.integers(WORDS, size=n)) for n in (2, 5, 9, 12)]
    (tmp_path / 'texts').mkdir()
    (tmp_path / 'texts' / 'lines.txt').write_text('\n'.join(lines) + '\n')
    model = tiny_lm(closed=True)
    for part in (model, tiny_tokenizer()):
        part.save_pretrained(tmp_path / 'model')
    found, tokens = score(str(tmp_path / 'model'), str(tmp_path / 'texts'), by='line', length=16)
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single='[CLS] $A [SEP]', special_tokens=[('[CLS]', 2), ('[SEP]', 3)]
    )
    tokenizer.batch_encode_plus = tokenizer.__call__  # its name before transformers 5, which minicons calls
    peer = scorer.MaskedLMScorer(model.eval(), 'cpu', tokenizer=tokenizer)
    theirs = [[-p for token, p in line if token.startswith('w')] for line in peer.token_score(lines)]
    ours = tokens.sort_values(['row', 'position']).groupby('row')['nll'].apply(list).tolist()
    assert found.tokens == sum(map(len, theirs)) == 28
    np.testing.assert_allclose(np.concatenate(ours), np.concatenate(theirs), atol=7e-6)
