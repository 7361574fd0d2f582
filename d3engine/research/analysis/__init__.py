"""What the layers of a model do while it answers: the D3 paper's Table 2 and Figures 2, 3, 4 and 7, as measured."""
