""" How sides are compared here: by turns, several rounds, medians. """
import statistics


def compare(sides, unit, rounds):
    """ Runs each side `rounds` times and prints its speed and its ratio to the first side's.
    sides: {name: function that returns the speed}. Returns {name: median speed}. """
    speeds = {name: [] for name in sides}
    for i in range(rounds):
        # by turns: what disturbs the machine disturbs all sides
        for name, measure in sides.items():
            speed = measure()
            speeds[name].append(speed)
            print(f'round {i + 1}/{rounds}  {name:<40} {speed:>12,.0f} {unit}', flush=True)

    first = next(iter(sides))
    print(f'\n{"":<40} {unit:>12}   '
          f'speed, relative to {first!r}: median (least, most) over rounds')
    medians = {}
    for name in sides:
        medians[name] = statistics.median(speeds[name])
        ratios = [speed / base for base, speed in zip(speeds[first], speeds[name])]
        print(f'{name:<40} {medians[name]:>12,.0f}   {statistics.median(ratios):.3f} '
              f'({min(ratios):.3f}, {max(ratios):.3f})')
    print()
    return medians
