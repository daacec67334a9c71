"""Gateware: generated Verilog for the expert datapath. Importing this package does not import Amaranth."""
