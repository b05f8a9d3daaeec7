"""``python -m s2d`` lists the programs."""

PROGRAMS = """\
python run.py --target 13b   answer a prompt, many prompts, or what is typed
python -m s2d.definition     an answer by the plain definition of S2D, step by step
python -m s2d.bench          measure: speed, hf, pays, papers
python -m s2d.train          train or make: soft, mini, decision, text
python -m s2d.trace.race     draw the animated picture of README.md

The first, s2d.bench and s2d.train have --help. The lesson is s2d/lesson/lesson.ipynb."""

if __name__ == "__main__":
    print(PROGRAMS)
