"What trackers have written, read back from the files of their off-line modes."

import io
import json
import struct
import time
import zipfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
import numpy as np
import pandas as pd
from PIL import Image
from kdnotes.core.files import runs_path


@dataclass
class Entry:
    "A run of a tracker."

    name: str
    settings: dict
    curves: dict = field(default_factory=lambda: defaultdict(list))  # tag -> (step, value), in order
    tables: dict = field(default_factory=dict)  # name -> a frame
    figures: dict = field(default_factory=dict)  # name -> pixels (height, width, 3)
    summary: dict = field(default_factory=dict)  # tag -> value, of a tracker that has one besides its curves

    def last(self, tag: str) -> float:
        return self.summary[tag] if tag in self.summary else self.curves[tag][-1][1]


def pixels(file) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file) if isinstance(file, bytes) else file).convert('RGB'))


def tensorboard(folder: Path) -> Entry:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / 'tb'), size_guidance=dict(images=0, scalars=0)).Reload()
    tags = events.Tags()
    entry = Entry('', {})
    for tag in tags['scalars']:
        entry.curves[tag] = [(e.step, e.value) for e in events.Scalars(tag)]
    for tag in tags['images']:
        entry.figures[tag.removeprefix('figures/')] = pixels(events.Images(tag)[-1].encoded_image_string)
    for tag in tags['tensors']:
        if tag.startswith('tables/'):
            [text] = events.Tensors(tag)[-1].tensor_proto.string_val
            rows = [line[2:-2].split(' | ') for line in text.decode().splitlines()]
            entry.tables[tag.removeprefix('tables/').removesuffix('/text_summary')] = pd.DataFrame(
                rows[2:], columns=rows[0]
            )
    return entry


def wandb_records(path: Path):
    "The records of a .wandb file: LevelDB's log format, with protocol buffers inside."
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    at, parts = 7, []  # after the header
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack('<IHB', data[at : at + 7])
        if at + 7 + length > len(data):  # it is still being written
            return
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, last part
            yield Record.FromString(b''.join(parts))
            parts = []


def tree(items) -> dict:
    "Keys and values of a record, the parts of a nested key as nested dicts."
    root = {}
    for item in items:
        *path, name = [*item.nested_key] or [item.key]
        inner = root
        for key in path:
            inner = inner.setdefault(key, {})
        inner[name] = json.loads(item.value_json)
    return root


def finished_wandb_records(path: Path, most_s: float = 60) -> list:
    "All records, when the last one is there: the process of W&B writes them, and may be later than `finish`."
    end = time.monotonic() + most_s
    while True:
        records = list(wandb_records(path))
        kinds = [record.WhichOneof('record_type') for record in records]
        if 'exit' in kinds:
            return records
        assert time.monotonic() < end, f'{path} of {path.stat().st_size} bytes has no end: {kinds}'
        time.sleep(0.2)


def wandb(folder: Path) -> Entry:
    files = max(folder.glob('wandb/offline-run-*'), key=lambda path: path.stat().st_mtime_ns)
    entry = Entry('', {})
    for record in finished_wandb_records(next(files.glob('run-*.wandb'))):
        kind = record.WhichOneof('record_type')
        if kind == 'run':
            entry.name = record.run.display_name or entry.name or record.run.run_id
            entry.settings |= tree(record.run.config.update)
        elif kind == 'summary':
            entry.summary |= tree(record.summary.update)
        elif kind == 'history':
            values = tree(record.history.item)
            for tag, value in values.items():
                if not isinstance(value, dict):
                    entry.curves[tag].append((values['_step'], value))
                elif value.get('_type') == 'image-file':
                    entry.figures[tag.removeprefix('figures/')] = pixels(files / 'files' / value['path'])
                elif value.get('_type') == 'table-file':
                    table = json.loads((files / 'files' / value['path']).read_text())
                    frame = pd.DataFrame(table['data'], columns=table['columns'])
                    entry.tables[tag.removeprefix('tables/')] = frame
    return entry


def mlflow(folder: Path) -> Entry:
    import mlflow

    client = mlflow.MlflowClient((runs_path() / '.mlflow').as_uri())
    study = folder.parent.name if folder.parent != runs_path() else folder.name
    experiment = client.get_experiment_by_name(study)
    named = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    run = named[folder.name]
    assert run.info.status == 'FINISHED'
    entry = Entry(run.info.run_name, run.data.params)
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        entry.curves['loss' if name == 'loss/total' else name] = [(m.step, m.value) for m in history]
    artifacts = Path(run.info.artifact_uri.removeprefix('file://'))
    for path in artifacts.rglob('*.csv'):
        entry.tables[path.stem] = pd.read_csv(path, keep_default_na=False)
    for path in artifacts.rglob('*.png'):
        entry.figures[path.stem] = pixels(path)
    return entry


def comet(folder: Path) -> Entry:
    entry = Entry('', {})
    with zipfile.ZipFile(max(folder.glob('comet/*.zip'), key=lambda path: path.stat().st_mtime_ns)) as file:
        for line in file.read('messages.json').splitlines():
            message = json.loads(line)
            payload = message['payload']
            if message['type'] == 'log_other' and payload['key'] == 'Name':
                entry.name = payload['value']
            elif message['type'] == 'parameter_msg':
                entry.settings[payload['param']['paramName']] = payload['param']['paramValue']
            elif message['type'] == 'metric_msg':
                metric = payload['metric']
                entry.curves[metric['metricName']].append((metric['step'], metric['metricValue']))
            elif message['type'] == 'file_upload':
                about = payload['additional_params']
                name, _, extension = (about.get('fileName') or about['figName']).partition('.')
                content = file.read(payload['file_path'])
                if extension == 'csv':
                    entry.tables[name] = pd.read_csv(io.BytesIO(content), keep_default_na=False)
                else:
                    entry.figures[name] = pixels(content)
    return entry


READERS = dict(tensorboard=tensorboard, wandb=wandb, mlflow=mlflow, comet=comet)
