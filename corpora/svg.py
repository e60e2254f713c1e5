"""
Draws SVG in a process of its own, so that no drawing can read a file, hang or fill the memory.

    with Painter(32) as paint:
        ink = paint('<svg ...>')             # (32, 32) uint8, or a word that says why not

The library is resvg. A drawing of one colour is its alpha channel: 0 is paper, 255 is ink.
Fonts are not read, so the same drawing has the same bytes on every machine.
Run as a file, this is the process: it reads a JSON string a line, and answers each with one byte,
0 or 1, and size * size bytes of ink.
"""
import io
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys

MOST_SECONDS = 1.0             # of the processor, for a drawing
PATIENCE = 60                  # seconds for an answer, on a machine that is busy with other work
MOST_BYTES = 300 * 2**20       # of memory, of all that the process does
LONGEST = 2**17                # characters of a drawing

# what a drawing could name a file or an address with. `<!` would bring entities, which hide a name
REACHES_OUT = re.compile(r'<!|<(\w+:)?(fe)?image\b|href\s*=\s*["\'](?!#)|@import', re.IGNORECASE)


class Painter:
    """ Draws at size x size pixels. ValueError where the library is not installed. """

    def __init__(self, size):
        self.size = size
        self.process = None
        try:
            import PIL
            import resvg_py
        except ImportError:
            raise ValueError('to draw icons: pip install resvg-py pillow') from None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stop()

    def stop(self):
        if self.process:
            self.process.kill()
            self.process.communicate()
        self.process = None

    def __call__(self, svg):
        """ The ink of a drawing, size * size bytes; or, where there is none, a word: `reaches out`,
        `costly` where it takes more than MOST_SECONDS or MOST_BYTES, or `broken`, which the library
        also says of too many elements. """
        if REACHES_OUT.search(svg):
            return 'reaches out'
        if len(svg) > LONGEST:
            return 'costly'

        # a process, which draws one after the other. Only a costly drawing ends it
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, '-S', os.path.realpath(__file__), str(self.size), *sys.path],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            if self.answer(1) != b'!':
                self.stop()
                raise ValueError('the process that draws icons does not begin: is resvg-py whole? '
                                 'pip install --force-reinstall resvg-py pillow')
        try:
            self.process.stdin.write(json.dumps(svg).encode() + b'\n')
            self.process.stdin.flush()
            answer = self.answer(1 + self.size ** 2)
        except BrokenPipeError:
            answer = None
        if answer is None:
            self.stop()
            return 'costly'
        return 'broken' if answer[0] else answer[1:]

    def answer(self, n):
        """ The next n bytes that the process says; None where it ends, or is silent. """
        pipe = self.process.stdout.fileno()
        said = b''
        while len(said) < n:
            ready, _, _ = select.select([pipe], [], [], PATIENCE)
            part = os.read(pipe, n - len(said)) if ready else b''
            if not part:
                return None
            said += part
        return said


def serve(size):
    """ The process. What it says on its standard output is the answers alone. """
    from PIL import Image
    from resvg_py import svg_to_bytes
    # the machine may have a lower limit of its own
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = MOST_BYTES if hard == resource.RLIM_INFINITY else min(hard, MOST_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    out = sys.stdout.buffer
    out.write(b'!')
    out.flush()
    for line in sys.stdin.buffer:
        # the default of this signal ends a process, also in the middle of the library's work
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        try:
            png = svg_to_bytes(svg_string=json.loads(line), skip_system_fonts=True,
                               width=size, height=size)
            ink = Image.open(io.BytesIO(png)).convert('RGBA').getchannel('A').tobytes()
        except BaseException:                                # the library panics in its own way
            ink = None
        whole = ink is not None and len(ink) == size ** 2
        out.write(b'\0' + ink if whole else b'\1' + bytes(size ** 2))
        out.flush()


if __name__ == '__main__':
    sys.path[:] = sys.argv[2:]
    serve(int(sys.argv[1]))
