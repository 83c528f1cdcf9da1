"""What people want: the models of spec files, and how their text becomes them. Pure: no files, no network, no clock."""
