from kdnotes.analysis.published_scaling import *
from kdnotes.analysis.plotting import figure_bytes
f=fit(); print(f.drop(columns='why').round(1).to_string())
print({m:unpredicted(m) for m in MODELS})
open('/tmp/a36/f1.png','wb').write(figure_bytes(figure_1(f),'png'))
