"""That it converges and never harms: any fleet, any first state, any faults, in any order."""
