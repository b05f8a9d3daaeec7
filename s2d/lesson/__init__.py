"""A lesson: the notebook lesson.ipynb, its pictures, and what checks its exercises."""
