"""Samplers beside each other on a surrogate: a random forest fitted to the recorded trials of a search.

No trial is trained, so that every sampler has as many repeats as one likes. What comes out is named a
surrogate's: it says how samplers cope with this space and these constraints, not what a student scores."""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
import numpy as np
import pandas as pd
from sklearn.ensemble import RandomForestRegressor
from golden import hypervolume_history
from kdnotes.search.front import box
from kdnotes.search.result import SearchResult, load_result
from kdnotes.search.store import TrialStore, constraints_of


def surrogate(found: SearchResult):  # params -> values by objective
    "A forest for each objective, of all trials in which it is known."
    names = sorted(found.space)
    forests = {}
    for objective in found.objectives:
        known = [t for t in found.trials if t.values.get(objective.name) is not None]
        rows = pd.DataFrame([[t.params[n] for n in names] for t in known], columns=names)
        values = [t.values[objective.name] for t in known]
        forests[objective.name] = RandomForestRegressor(300, random_state=0).fit(rows, values)
    return lambda params: {
        name: float(forest.predict(pd.DataFrame([[params[n] for n in names]], columns=names))[0])
        for name, forest in forests.items()
    }


def race(found: SearchResult, sampler: str, n_trials: int, seed: int, value_of) -> tuple[np.ndarray, float]:
    "The covered share after each trial, and seconds that the sampler took for one."
    worst, best = box(found.trials, found.objectives)
    threshold = found.threshold
    with TemporaryDirectory() as folder:
        store = TrialStore(
            'race',
            Path(folder) / 'trials.journal',
            found.space,
            found.objectives,
            dict(study=found.study),
            sampler=sampler,
            seed=seed,
        )
        spent = 0.0
        for _ in range(n_trials):
            began = time.perf_counter()
            trial = store.ask()
            spent += time.perf_counter() - began
            values = value_of(trial.params)
            missed = (
                0.0
                if threshold is None
                else threshold.excess(values['score'], found.objectives[0].higher_is_better)
            )
            causes = ['threshold'] * (missed > 0)
            store.tell(trial, values, worst, constraints_of(causes, dict(threshold=missed)), causes=causes)
        return hypervolume_history(store.trials(), found.objectives, worst, best), spent / n_trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('study', help='a search that has ended')
    parser.add_argument('--samplers', default='tpe,random,nsga2,gp')
    parser.add_argument('--trials', type=int, default=60)
    parser.add_argument('--repeats', type=int, default=3)
    given = parser.parse_args()
    found = load_result(given.study)
    value_of = surrogate(found)
    for sampler in given.samplers.split(','):
        made = [race(found, sampler, given.trials, seed, value_of) for seed in range(given.repeats)]
        ends = [float(history[-1]) for history, _ in made]
        print(
            json.dumps(
                dict(
                    sampler=sampler,
                    covered=[round(e, 4) for e in ends],
                    mean=round(float(np.mean(ends)), 4),
                    spread=round(float(np.ptp(ends)), 4),
                    sampler_s_a_trial=round(float(np.mean([s for _, s in made])), 3),
                )
            ),
            flush=True,
        )


if __name__ == '__main__':
    main()
