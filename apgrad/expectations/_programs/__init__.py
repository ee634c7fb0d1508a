"""What expectations alone read in programs: uses of parameters, signs of sketches, marks, and the lanes' axis."""
