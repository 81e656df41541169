# The document's way to agree on who sets up a shared folder: look, then mkdir and touch. Reads one folder a line, answers won or lost.
while read -r folder; do
    if [ ! -e "$folder/ready" ]; then
        mkdir -p "$folder"
        touch "$folder/ready"
        echo won
    else
        echo lost
    fi
done
