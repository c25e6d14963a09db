"""Whatever is trained is saved, and loads equal: each head, tied to the embeddings or not, of each family and
task; with heads taken out; and after a run, from `model/`, `pruned/` and an export.
"""

import copy
import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, configs, write_teacher
from kinds import one_of_each
from small_runs import ON, small_model
from kdnotes.core.config import TASKS, task_info
from kdnotes.core.parse import make_config
from kdnotes.distill.architectures import call, weights_sha256
from kdnotes.distill.heads import SHAPED, set_heads, whole_model
from kdnotes.distill.models import load_given, load_model, save_model
from kdnotes.experiment.export import export_model
from kdnotes.experiment.launch import execute
from kdnotes.experiment.plan import plan
from kdnotes.losses.vocabulary import as_tensor
from kdnotes.results.runs import RunFolder

HEADS = sorted({task_info(task).auto_class for task in TASKS})
IDS = dict(
    input_ids=torch.tensor([[2, 7, 8, 9, 3, 0]]),
    attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0]]),
    token_type_ids=torch.zeros(1, 6, dtype=torch.int64),
)


def outputs(model) -> list:
    with torch.no_grad():
        found = call(model.eval(), IDS)
    if 'last_hidden_state' in found:  # no head
        return [found.last_hidden_state]
    return [as_tensor(found.logits)] if 'logits' in found else [found.start_logits, found.end_logits]


def trained(config, head: str, tied: bool, folder):
    "A model as a run has it, each of its numbers moved as by a training."
    config.tie_word_embeddings = tied
    write_teacher(folder, config)
    getattr(hf, head).from_config(config).save_pretrained(folder)
    model = load_model(folder, head, seed=0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def check_saved(model, folder, head: str) -> None:
    save_model(model, folder, hf.AutoTokenizer.from_pretrained(folder.parent / 'start'))
    loaded = load_given(folder, head)  # refuses what lacks a tensor
    torch.testing.assert_close(outputs(loaded), outputs(model), atol=1e-6, rtol=0)
    assert weights_sha256(loaded) == weights_sha256(model)
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in loaded.named_parameters(remove_duplicate=False):
        assert torch.equal(parameter, own[name]), name


@pytest.mark.parametrize('tied', [True, False], ids=['tied', 'untied'])
@pytest.mark.parametrize('head', one_of_each(HEADS))
@pytest.mark.parametrize('kind', ARCHITECTURES)
def test_what_is_trained_is_saved_and_loads_equal(tmp_path, kind, head, tied):
    model = trained(configs(2)[kind], head, tied, tmp_path / 'start')
    check_saved(model, tmp_path / 'model', head)
    plain = getattr(hf, head).from_pretrained(tmp_path / 'model')  # as others load it
    torch.testing.assert_close(outputs(plain), outputs(model), atol=1e-5, rtol=0)
    if model.config.model_type in SHAPED:
        pruned = set_heads(copy.deepcopy(model), [[0], [1]])
        check_saved(pruned, tmp_path / 'pruned', head)
        check_saved(whole_model(pruned), tmp_path / 'whole', head)


@pytest.mark.exhaustive
def test_a_run_of_an_untied_language_model_is_loaded_after_its_end(tmp_path, home, rank_here):
    folder = small_model(tmp_path / 'teacher')
    config = hf.AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    hf.BertForMaskedLM(config).save_pretrained(folder)
    asked = dict(task='masked_lm', corpus='embedded', teacher=str(folder), max_length=32, smoke=True)
    its = plan(
        make_config(**asked, mode='full_kd', student_layers=(1,), heads=1, ranks=1, threads_per_rank=1), ON
    )
    record = execute(its)
    run = RunFolder(record['study'], record['run_id']).path
    model = load_given(run / 'model', 'AutoModelForMaskedLM')
    assert weights_sha256(model) == record['model_sha256']
    bias = dict(model.named_parameters(remove_duplicate=False))['cls.predictions.decoder.bias']
    assert bias.abs().max() > 0
    pruned = load_given(run / 'pruned', 'AutoModelForMaskedLM')
    torch.testing.assert_close(outputs(pruned), outputs(model), atol=1e-5, rtol=0)
    export_model(record['run_id'], str(tmp_path / 'mine'))
    assert weights_sha256(load_given(tmp_path / 'mine', 'AutoModelForMaskedLM')) == record['model_sha256']
    assert execute(its)['model_sha256'] == record['model_sha256']  # done already, and not made again
