"""Tests that cannot fail prove nothing: named mistakes in a copy of the package, and the tests that see them.

A mistake is a substitution in one module; what it replaces must stand there exactly once, so that mistakes
do not fall out of date unseen."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
import pytest
import test_dropout
import test_parity
import test_precision
from kinds import one_of_each
from parity import Run, World
from ranks import HERE, launch

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Mutant:
    "A mistake."

    name: str
    module: str  # of kdnotes: 'train.loop'
    old: str
    new: str
    seen_by: str | Callable[[World], None]  # 'file::test', or a test of test_parity


RANKS = Run(2, tokens=32)
micro_batches = partial(test_parity.test_micro_batches_do_not_matter, kd=True, dtype='fp32')
ranks = partial(test_parity.test_ranks_do_not_matter, run=RANKS)
equal_on_ranks = partial(test_parity.test_gradients_and_weights_are_equal_on_all_ranks, run=RANKS)
one_all_reduce = partial(test_parity.test_one_all_reduce_a_step, run=RANKS)
teacher_alone = partial(test_parity.test_teacher_in_the_trainer_is_the_teacher_alone, run=Run())
cached = partial(test_parity.test_cached_signal_is_the_online_one, run=Run(signal='fp32'))


def same_steps_skipped(w):
    return test_precision.check_same_steps_skipped(
        [notes['low'] for notes in test_precision.trained(2, ('low',), package=w.package)]
    )


def own_dropout(w):
    return test_dropout.check_own_streams(launch('test_dropout:trained_rank', ranks=2, package=w.package))


by_hand = 'test_losses.py::test_soft_targets_by_hand'

MUTANTS = [
    Mutant(
        'the worse of two models is kept',
        'train.state',
        "value > best['value'] if",
        "value < best['value'] if",
        'test_keep_best.py::test_the_best_is_that_step[falls again]',
    ),
    Mutant(
        'the best model is not in a checkpoint',
        'train.state',
        "tensors['best'] = state.best",
        'pass',
        'test_keep_best.py::test_stopped_and_taken_up[9]',
    ),
    Mutant(
        'soft targets without T*T',
        'losses.targets',
        'reduce_rows(rows, reduction) * (T * T)',
        'reduce_rows(rows, reduction)',
        by_hand,
    ),
    Mutant(
        'sides of the KL swapped',
        'losses.targets',
        'F.kl_div(log_q, log_p,',
        'F.kl_div(log_p, log_q,',
        by_hand,
    ),
    Mutant(
        'ties in the order of the names',
        'tasks.ranking_metrics',
        'np.lexsort((-questions.tie,',
        'np.lexsort((questions.tie,',
        'test_ranking_metrics.py::test_equal_to_trec_eval',
    ),
    *(
        Mutant(
            f'divided by the local count, {name}',
            'train.loop',
            'counts[name]',
            'max(1, terms[name][1])',
            test,
        )
        for name, test in {'micro-batches': micro_batches, 'ranks': ranks}.items()
    ),
    Mutant(
        'divided by the number of examples',
        'train.loop',
        'counts[name]',
        'len(index)',
        'test_parity.py::test_loss_of_a_step_in_plain_torch',
    ),
    Mutant('mean over ranks of sums', 'train.loop', 'total * runtime.ranks', 'total', ranks),
    Mutant(
        'a number read in the hot loop',
        'train.loop',
        'total, shares = weighted_sum(shares, objective.loss_weights)',
        'total, shares = weighted_sum(shares, objective.loss_weights)\n            total.item()',
        'test_loop.py::test_no_line_of_ours_waits_for_the_device_within_a_step',
    ),
    Mutant('an idle rank counts its stand-in', 'train.loop', 'float(i < n_own)', '1.', ranks),
    *(
        Mutant(
            f'forward past DDP, {name}',
            'train.loop',
            'with runtime.autocast():\n                outputs = call(model, ',
            "with runtime.autocast():\n                outputs = call(getattr(model, 'module', model), ",
            test,
        )
        for name, test in {'gradients': equal_on_ranks, 'all-reduces': one_all_reduce}.items()
    ),
    Mutant(
        'forward past DDP in call',
        'distill.architectures',
        'return model(**given)',
        'return unwrap(model)(**given)',
        equal_on_ranks,
    ),
    Mutant(
        'all-reduce at every micro-batch',
        'train.loop',
        'more = runtime.ranks > 1 and',
        'more = False and',
        one_all_reduce,
    ),
    Mutant(
        'call drops token_type_ids',
        'distill.architectures',
        'inputs.items() if name in names}',
        "inputs.items() if name in names and name != 'token_type_ids'}",
        teacher_alone,
    ),
    Mutant(
        'the teacher gets what the student takes',
        'distill.teacher_cache',
        'call(teacher, batch.inputs)',
        "call(teacher, {k: v for k, v in batch.inputs.items() if k != 'token_type_ids'})",
        teacher_alone,
    ),
    Mutant('teacher left in training mode', 'distill.teacher_cache', 'teacher.eval()', 'pass', teacher_alone),
    Mutant('teacher with a graph', 'distill.teacher_cache', '@torch.no_grad()\n', '', teacher_alone),
    *(
        Mutant(name, module, old, new, 'test_resume.py::test_stopped_and_taken_up')
        for name, module, old, new in (
            ('a random state forgotten', 'train.checkpoint', '    set_random_states({', '    dict({'),
            (
                'moments forgotten',
                'train.checkpoint',
                'if stored:\n            optimizer.state[p] =',
                'if not stored:\n            optimizer.state[p] =',
            ),
            ('begun at the first step again', 'train.loop', 'done=done)[1]', 'done=0)[1]'),
            (
                "untouched rows' decay forgotten",
                'train.state',
                "state.fast_path.decay = checkpoint.state['decay']",
                'pass',
            ),
        )
    ),
    Mutant(
        'a step that is not finite is taken',
        'train.precision',
        'optimizer.found_inf =',
        '_ =',
        'test_resume.py::test_a_step_that_is_not_finite_is_not_taken',
    ),
    Mutant(
        'small gradients scaled up',
        'train.precision',
        '(norm / config.train.max_grad_norm).clamp(min=1.0)',
        'norm / config.train.max_grad_norm',
        'test_precision.py::test_small_gradients_are_not_scaled_up',
    ),
    Mutant(
        "every rank takes up rank 0's random state",
        'train.checkpoint',
        "prefix = f'{rank}.'",
        "prefix = '0.'",
        'test_resume.py::test_each_rank_takes_up_its_own_random_state',
    ),
    Mutant(
        'steps in the order of their lengths',
        'tasks.batching',
        'for i in rng.permutation(len(cuts) - 1)]',
        'for i in range(len(cuts) - 1)]',
        'test_batching.py::test_steps_come_in_random_order_of_length',
    ),
    Mutant(
        'kept tokens whatever their length',
        'tasks.batching',
        '_rules(tokenizer), str(max_length), str(ROWS_AT_ONCE))',
        '_rules(tokenizer), str(ROWS_AT_ONCE))',
        'test_batching.py::test_kept_tokens_of_another_length_are_not_taken',
    ),
    *(
        Mutant(f'one stream of dropout for all ranks, {name}', 'train.loop', old, new, own_dropout)
        for name, old, new in (
            (
                'masks',
                'runtime.device, _dropout_seed(config, runtime), batches_change',
                "runtime.device, torch_seed(config.seed, 'dropout', 0), batches_change",
            ),
            (
                "torch's",
                'torch.manual_seed(_dropout_seed(config, runtime))',
                "torch.manual_seed(torch_seed(config.seed, 'dropout', 0))",
            ),
        )
    ),
    Mutant(
        'untouched rows do not decay',
        'train.loop',
        'fast.decay *= 1 - rate * config.weight_decay',
        'pass',
        'test_parity.py::test_untouched_rows_decay',
    ),
    *(
        Mutant(name, module, old, new, same_steps_skipped)
        for name, module, old, new in (
            (
                'an overflow without a row',
                'train.loop',
                "state.row('overflow', step=step.done, scale=before)",
                'pass',
            ),
            (
                'overflows not counted',
                'train.loop',
                'state.result.overflow_steps = (state.result.overflow_steps or 0) + 1',
                'pass',
            ),
            (
                "the table's rows of each rank for itself",
                'train.loop',
                'runtime.sum(gradient).div_(runtime.ranks)',
                'gradient',
            ),
        )
    ),
    Mutant(
        "a cache's rows by place in the batch",
        'distill.teacher_cache',
        '[name][rows]',
        '[name][: len(rows)]',
        cached,
    ),
    *(
        Mutant(name, 'distill.needed_positions', old, new, f'test_needed_positions.py::{test}')
        for name, old, new, test in (
            (
                'another position than the first',
                'states[:, :1]',
                'states[:, 1:2]',
                'test_logits_and_gradients_are_those_of_the_plain_forward',
            ),
            (
                'padding attended to in the last layer',
                'None if mask is None else mask[..., :1, :]',
                'None',
                'test_logits_and_gradients_are_those_of_the_plain_forward',
            ),
            (
                "the last layer's attention without dropout",
                'module.dropout.p if module.training else 0.0',
                '0.0',
                'test_dropout_of_the_last_layer_has_the_same_mean_and_second_moment',
            ),
            (
                'padding attended to without keys',
                'row = mask[:, 0, :1]',
                'row = torch.ones_like(mask[:, 0, :1])',
                'test_logits_and_gradients_are_those_of_the_plain_forward',
            ),
            (
                'attention without dropout, without keys',
                'module.dropout(scores.softmax(-1))',
                'scores.softmax(-1)',
                'test_dropout_of_the_last_layer_has_the_same_mean_and_second_moment',
            ),
            (
                "the keys' bias forgotten",
                'states.transpose(1, 2)) + offset) * module.scaling',
                'states.transpose(1, 2))) * module.scaling',
                'test_logits_and_gradients_are_those_of_the_plain_forward',
            ),
            (
                "the values' bias as if nothing were dropped",
                '_swap(weights.sum(-1, keepdim=True), heads) * value.bias',
                'value.bias',
                'test_dropout_of_the_last_layer_has_the_same_mean_and_second_moment',
            ),
            (
                'an adapter that is not asked',
                'if short and plain:',
                'if short:',
                'test_projections_that_are_not_plain_are_called',
            ),
            (
                'hidden states of one position',
                'if not requested or looked_at:',
                'if not requested:',
                'test_what_is_asked_for_is_whole',
            ),
        )
    ),
    Mutant(
        'the first position where losses look at all',
        'train.loop',
        'contextlib.nullcontext() if uses_intermediate_layers(config) else first_position(model)',
        'first_position(model)',
        'test_needed_positions.py::test_a_training_that_looks_at_layers_computes_all_positions',
    ),
    Mutant(
        'weights that are multiplied unrounded',
        'train.precision',
        '        weight = weight.bfloat16()',
        '        pass',
        'test_emulated_bf16.py::test_gradients_are_those_of_torchs_matmuls_and_not_fp32s',
    ),
    Mutant(
        'activations kept in fp32',
        'train.precision',
        'ctx.save_for_backward(x, weight)\n',
        'ctx.save_for_backward(x.float(), weight)\n',
        'test_emulated_bf16.py::test_activations_are_kept_in_16_bits',
    ),
    Mutant(
        'matmuls in fp32 on every CPU',
        'train.distributed',
        "emulated_bf16=dtype == 'bf16' and not cuda and not cpu_has_bf16()",
        "emulated_bf16=dtype == 'bf16' and not cuda",
        'test_emulated_bf16.py::test_a_run_uses_them_where_the_cpu_has_no_instructions',
    ),
    Mutant(
        'a teacher in fp32 that was asked in bf16',
        'distill.teacher_cache',
        "enabled=forward_dtype == 'bf16'",
        "enabled=forward_dtype == 'fp8'",
        'test_teacher_signal.py::test_a_teacher_in_bf16_is_itself_in_bf16',
    ),
    Mutant(
        "another signal's shard",
        'core.cached',
        "if known['folder'] != path.parent.name:",
        'if False:',
        'test_teacher_signal.py::test_a_shard_of_another_corpus_is_not_believed',
    ),
    Mutant(
        "each shard's rows at the batch's beginning",
        'distill.teacher_cache',
        'values[_rows_of(where, places)] =',
        'values[: len(rows)] =',
        'test_teacher_signal.py::test_fewer_examples_than_ranks',
    ),
    Mutant(
        'a report for every batch',
        'core.progress',
        'due = time.monotonic() + EVERY_S',
        'due = time.monotonic()',
        'test_progress.py::test_what_is_long_reports_at_most_twice_a_second',
    ),
    Mutant(
        'pools that do not begin with a step',
        'tasks.batching',
        'step = (begin - pool_begin) // batch_size',
        'step = begin // batch_size',
        'test_batching.py::test_steps_are_those_of_the_loop_over_groups',
    ),
    Mutant(
        'rows in use without the padding',
        'tasks.batching',
        '            yield np.array([self.pad_id])',
        '            pass',
        'test_batching.py::test_rows_in_use_are_those_of_the_batches',
    ),
    Mutant(
        'offsets that begin anew with each chunk',
        'tasks.batching',
        "ends = writer.rows('values') + ids.offsets[1 if start else 0 :]",
        'ends = ids.offsets[1 if start else 0 :]',
        'test_batching.py::test_chunks_are_what_is_tokenised_at_once',
    ),
    Mutant(
        'token ids cut to 16 bits',
        'tasks.batching',
        'max(tokenizer.get_vocab().values()) < 2**16 else',
        'True else',
        'test_batching.py::test_a_large_vocabulary_and_long_texts_take_wider_numbers',
    ),
    Mutant(
        'a disk that nobody asks',
        'tasks.batching',
        'check_room(writer.folder.parent, 1.05 * size,',
        'check_room(writer.folder.parent, 0,',
        'test_batching.py::test_the_size_that_is_foreseen_is_that_of_the_map',
    ),
    Mutant(
        'tokens that two processes make at once',
        'core.cached',
        "with lock(folder.with_suffix('.lock')):",
        'with suppress(KeyError):',
        'test_batching.py::test_processes_that_make_the_same_tokens_do_not_harm_each_other',
    ),
    Mutant(
        'a library races in its slower format',
        'bench.race',
        'dtype = max(rates, key=rates.get)',
        'dtype = min(rates, key=rates.get)',
        'test_bench.py::test_each_library_races_in_its_faster_format',
    ),
    Mutant(
        'the fp32 signal is charged as the bf16 one',
        'bench.results',
        "'kdnotes_cold_bf16': 'teacher_bf16'",
        "'kdnotes_cold_bf16': 'teacher'",
        'test_bench.py::test_the_rest_of_the_lead_is_counted_in_operations',
    ),
    Mutant(
        'padding counts for nothing',
        'bench.results',
        "padded = (1 - padding['hf_best']) / (1 - padding['hf_default'])",
        'padded = 1.0',
        'test_bench.py::test_the_rest_of_the_lead_is_counted_in_operations',
    ),
    Mutant(
        "a user's run with the threads of the race",
        'bench.contestants',
        "if c.trains != 'run':",
        'if True:',
        'test_bench.py::test_a_users_run_has_the_ranks_and_threads_of_a_plain_run',
    ),
    Mutant(
        'the first round on a GPU counts',
        'bench.race',
        'if turn >= self.warm:',
        'if True:',
        'test_bench.py::test_the_first_round_on_a_gpu_is_left_out_and_no_turn_begins_too_late',
    ),
    Mutant(
        'a corpus kept whatever its files are now',
        'tasks.sources',
        "key = sha256_text('corpus-8', read_as, json.dumps(before, sort_keys=True))",
        "key = sha256_text('corpus-8', read_as)",
        'test_large_corpora.py::test_a_file_that_changed_is_another_corpus',
    ),
    Mutant(
        'columns that nobody vouches for',
        'core.cached',
        "if any(sha256_file(folder / name) != file['sha256'] for name, file in known['files'].items()):",
        'if False:',
        'test_large_corpora.py::test_a_kept_corpus_that_was_damaged_is_read_again',
    ),
    Mutant(
        'a corpus kept after its files changed',
        'core.tables',
        'if not path.exists() or file_state(path) != before[path]:',
        'if False:',
        'test_large_corpora.py::test_a_file_that_changes_while_it_is_read',
    ),
    Mutant(
        'contradictions counted by labels',
        'tasks.sources',
        'text, n_labels = np.unique(pairs[:, 0], return_counts=True)',
        'text, n_labels = np.unique(texts[split], return_counts=True)',
        'test_corpus_errors.py::test_rows_that_are_scored_on_are_counted_and_learnt_from_nowhere_else',
    ),
    Mutant(
        'ids that occur twice in different parts',
        'tasks.schema',
        'yield schema.unique, twin, twin != np.arange(len(rows)),',
        'yield schema.unique, twin, twin < 0,',
        'test_corpus_errors.py::test_a_file_that_is_wrong_is_named_with_its_place',
    ),
    Mutant(
        'members that come later are lost',
        'core.tables',
        'for _, row in first for name in row)',
        'for _, row in first[:1] for name in row)',
        'test_corpus_errors.py::test_a_file_that_is_wrong_is_named_with_its_place[a member that comes later]',
    ),
    Mutant(
        'cells of CSV that lose their blanks',
        'core.tables',
        'delimiter=separator, strict=True)',
        'delimiter=separator, strict=True, skipinitialspace=True)',
        'test_corpus_errors.py::test_odd_files_are_read_as_what_they_say[blanks-]',
    ),
    Mutant(
        'a kernel that remembers the notebook before',
        'experiment.display',
        'get_ipython().reset(new_session=True)\n',
        '',
        'test_display.py::test_a_kernel_is_used_again_and_knows_nothing_of_before',
    ),
    Mutant(
        'the format a teacher computes in is no factor',
        'core.run_id',
        "if loss and loss.forward_dtype != 'fp32':",
        'if loss and not loss.forward_dtype:',
        'test_compare.py::test_a_teacher_in_another_format_is_a_factor_and_no_others_effect',
    ),
    Mutant(
        'ids that begin anew with each part',
        'tasks.labelled_texts',
        'before = numbers.stop',
        'before = 0',
        'test_large_corpora.py::test_parts_of_a_table_are_the_whole_of_it',
    ),
]


def copy_package(folder: Path, mutant: Mutant | None = None) -> Path:
    "kdnotes and its bench in a folder of their own, with a mistake in one."
    for name in ('kdnotes', 'bench'):
        shutil.copytree(HERE.parent / name, folder / name, ignore=shutil.ignore_patterns('__pycache__'))
    if mutant:
        path = source_of(mutant, folder)
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
    return folder


def source_of(mutant: Mutant, folder: Path = HERE.parent) -> Path:
    "The file that a mistake is made in."
    path = folder.joinpath('kdnotes', *mutant.module.split('.')).with_suffix('.py')
    return path if path.exists() else folder.joinpath(*mutant.module.split('.')).with_suffix('.py')


@pytest.mark.parametrize('mutant', MUTANTS, ids=lambda m: m.name)
def test_what_a_mistake_replaces_is_there(mutant):
    assert source_of(mutant).read_text().count(mutant.old) == 1, 'the code has changed: write the mutant anew'


@pytest.mark.parametrize('mutant', one_of_each(MUTANTS), ids=lambda m: m.name)
def test_a_mistake_is_seen(mutant, tmp_path):
    package = copy_package(tmp_path, mutant)
    if isinstance(mutant.seen_by, str):
        [outcomes] = launch('ranks:run_tests', mutant.seen_by, package=package)
        assert {kind for _, kind in outcomes} - {'passed'} == {'AssertionError'}, outcomes
    else:
        with pytest.raises(AssertionError):
            mutant.seen_by(World(tmp_path / 'signals', package=package))


@pytest.mark.exhaustive
def test_without_a_mistake_the_same_tests_pass(tmp_path):
    package = copy_package(tmp_path)
    [outcomes] = launch(
        'ranks:run_tests',
        *sorted({m.seen_by for m in MUTANTS if isinstance(m.seen_by, str)}),
        package=package,
        timeout_s=600,
    )
    assert outcomes and {kind for _, kind in outcomes} == {'passed'}
    world = World(tmp_path / 'signals', package=package)
    for test in dict.fromkeys(m.seen_by for m in MUTANTS if not isinstance(m.seen_by, str)):
        test(world)
