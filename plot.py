"""
Pictures of a run, from the files in its folder. Needs matplotlib: pip install matplotlib

    python plot.py --out_dir=out/quickstart                              # training_log.jsonl
    python plot.py --out_dir=out/quickstart --what=sweep --metric=bleu   # evaluate.py --sweep=...
    python plot.py --out_dir=out/atat --what=importance                  # and --tasks=importance
    python plot.py --out_dir=out/image_text --what=images                # and --tasks=image
    python plot.py --out_dir=out/quickstart,out/mixed --what=runs        # validations, side by side
    python plot.py --out_dir=out/quickstart --what=report                # a page of all, by the run

A sweep over steps is drawn against the network calls that a text took, a line per sampler; over
another knob against that knob. The code is in benchmarks/pictures.py. The report is one HTML file
without matplotlib; its code is in benchmarks/report.py.
"""
import os

from benchmarks import pictures
from configurator import configure, stop, stop_on_error

out_dir = 'out/quickstart'      # runs: several, with commas between them
what = 'curves'                 # curves | runs | sweep | importance | images | report
metric = 'bleu'                 # sweep: of l2t or t2l, as named in results.json
save = ''                       # the picture; '': <the first out_dir>/<what>.png, or report.html
dataset = ''                    # report: where the run's dataset lies; '': where it was trained


def draw(plt):
    """ The picture that is asked for. ValueError says what is missing. """
    if what == 'images':
        return pictures.draw_images(pictures.read_images(out_dir), plt)
    if what == 'importance':
        results = pictures.read_importance(out_dir)
        entries = pictures.read_log(os.path.join(out_dir, 'training_log.jsonl'))
        return pictures.draw_importance(entries, results, plt)
    if what == 'sweep':
        results = pictures.read_results(os.path.join(out_dir, 'results.json'))
        sweeps = pictures.read_sweeps(results, metric)
        if not sweeps:
            raise ValueError(f'{out_dir}/results.json has no sweep with {metric}: '
                             'run evaluate.py --sweep=... first')
        return pictures.draw_sweeps(sweeps, metric, plt)
    if what == 'runs':
        paths = [path.strip() for path in out_dir.split(',')]
        folders = {os.path.basename(os.path.normpath(path)): path for path in paths}
        if len(folders) < len(paths):
            raise ValueError(f'out_dir={out_dir}: two runs of one name')
        logs = {name: pictures.read_log(os.path.join(path, 'training_log.jsonl'))
                for name, path in folders.items()}
        return pictures.draw_runs(logs, plt)
    return pictures.draw_curves(pictures.read_log(os.path.join(out_dir, 'training_log.jsonl')), plt)


def write_report():
    """ A page of the run: report.html. """
    path = save or os.path.join(out_dir, 'report.html')
    with stop_on_error():
        from benchmarks import report
        page = report.page(out_dir, dataset)
        with open(path, 'w', encoding='utf-8') as f:
            f.write(page)
    print(f'written to {path}')


def main():
    configure(globals())
    if what not in ('curves', 'runs', 'sweep', 'importance', 'images', 'report'):
        stop(f'what={what!r}: choose from curves, runs, sweep, importance, images, report')
    if what == 'report':
        write_report()
        return
    try:
        import matplotlib
    except ImportError:
        stop('plot.py needs matplotlib: pip install matplotlib')
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    with stop_on_error():
        figure = draw(plt)
        figure.tight_layout()
        folder = out_dir.split(',')[0] if what == 'runs' else out_dir
        path = save or os.path.join(folder, f'{what}.png')
        figure.savefig(path, dpi=110)
    print(f'written to {path}')


if __name__ == '__main__':
    main()
