"""What expectations alone read in programs: uses of parameters, signs of sketches, and the lanes' axis."""
