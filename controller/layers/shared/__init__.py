"""What several layers know alike: Proxmox configs, boards, device rules, who has which GPU. Pure."""
