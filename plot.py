"""
Pictures of a run, from the files in its folder. Needs matplotlib: pip install matplotlib

    python plot.py --out_dir=out/quickstart                              # training_log.jsonl
    python plot.py --out_dir=out/quickstart --what=sweep --metric=bleu   # evaluate.py --sweep=...
    python plot.py --out_dir=out/atat --what=importance                  # and --tasks=importance
    python plot.py --out_dir=out/image_text --what=images                # and --tasks=image
    python plot.py --out_dir=out/quickstart,out/seed1 --what=runs        # validations, side by side
    python plot.py --out_dir=out/quickstart --what=report                # a page of all, by the run

A sweep over steps is drawn against the network calls that a text took, a line per sampler; over
another knob against that knob. The code is in benchmarks/pictures.py. The report is one HTML file;
its code is in benchmarks/report.py.
"""
import os

from runs import console

console.begin(__name__)

from benchmarks import pictures
from configurator import configure, stop_on_error
from runs.files import write_text, write_whole

out_dir = 'out/quickstart'      # runs: several, with commas between them
what = 'curves'                 # curves | runs | sweep | importance | images | report
metric = 'bleu'                 # sweep: of l2t or t2l, as named in results.json
save = ''                       # the picture; '': <the first out_dir>/<what>.png, or report.html
dataset = ''                    # report: where the run's dataset lies; '': where it was trained


def draw(plt):
    """ The picture that is asked for. ValueError says what is missing. """
    if what == 'images':
        return pictures.draw_images(pictures.read_images(out_dir), plt)
    if what in ('importance', 'sweep'):
        results = pictures.read_results(os.path.join(out_dir, 'results.json'))
    if what == 'sweep':
        return pictures.draw_sweeps(pictures.read_sweeps(results, metric), metric, plt)

    # from the log of one run, or of several
    paths = [path.strip() for path in out_dir.split(',')] if what == 'runs' else [out_dir]
    folders = {os.path.basename(os.path.normpath(path)): path for path in paths}
    if len(folders) < len(paths):
        raise ValueError(f'out_dir={out_dir}: two runs of one name')
    logs = {name: pictures.read_log(os.path.join(path, 'training_log.jsonl'))
            for name, path in folders.items()}
    if what == 'runs':
        return pictures.draw_runs(logs, plt)
    entries, = logs.values()
    if what == 'importance':
        return pictures.draw_importance(entries, results, plt)
    return pictures.draw_curves(entries, plt)


def main():
    configure(globals())
    with stop_on_error():
        if what == 'report':
            from benchmarks import report              # it loads the run, the others read files
            path = save or os.path.join(out_dir, 'report.html')
            page = report.page(out_dir, dataset)
            write_text(path, page)
        else:
            path = save or os.path.join(out_dir.split(',')[0], f'{what}.png')
            figure = draw(pictures.pyplot())
            figure.tight_layout()
            kind = os.path.splitext(path)[1][1:] or 'png'
            with write_whole(path) as f:
                figure.savefig(f, dpi=110, format=kind)
    print(f'written to {path}')


if __name__ == '__main__':
    main()
